"""Suggestions of the shell: keys of the job file, runs, suites. No torch."""

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from trainer.presets.files import schema_places
from trainer.run.layout import JOB_FILE

_MOST_RUNS = 1000


def keys(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Returns the keys of the job file that begin so, or the values of a key that has a few."""
    places = {name: place for name, place in schema_places().items() if "properties" not in place}
    key, assigned, value = begun.partition("=")
    if not assigned:
        return [CompletionItem(f"{name}=") for name in places if name.startswith(key)]
    values = places.get(key, {}).get("enum", [])
    return [CompletionItem(f"{key}={each}") for each in values if str(each).startswith(value)]


def key_names(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Returns the sections and keys of the job file that begin so."""
    return [CompletionItem(name) for name in sorted(schema_places()) if name and name.startswith(begun)]


def runs(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Returns the names of the runs in ./runs that begin so, and files and folders if there is none."""
    found = [path.parent.name for path in Path("runs").glob(f"*/{JOB_FILE}")][:_MOST_RUNS]
    named = [CompletionItem(name) for name in sorted(found) if name.startswith(begun)]
    return named or [CompletionItem(begun, type="file")]


def suites(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Returns the names of suites and data sets of `clipship eval --suite` that begin so."""
    from trainer.evaluate.suite_data import known_names

    return [CompletionItem(name) for name in known_names() if name.startswith(begun)]
