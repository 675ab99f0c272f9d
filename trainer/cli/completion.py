"""The command `clipship completion`, and what the shell suggests: keys of the job file and runs. No torch."""

from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ShellComplete, ZshComplete

from trainer.cli.options import NearChoice
from trainer.presets.files import schema_places
from trainer.run.layout import JOB_FILE

_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_BASH_ADDS, _BASH_JOINS = (
    "COMPREPLY+=($value)",
    "COMPREPLY+=($value); [[ $value != *= ]] || compopt -o nospace",
)
_MOST_RUNS = 1000


@click.command(
    epilog="""\b
Examples:
  source <(clipship completion bash)        for this shell
  clipship completion bash > ~/.local/share/bash-completion/completions/clipship
  clipship completion zsh > "${fpath[1]}/_clipship"
  clipship completion fish > ~/.config/fish/completions/clipship.fish"""
)
@click.argument("shell", type=NearChoice(list(_SHELLS)))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, presets, runs and keys of the job file in SHELL."""
    made = _SHELLS[shell](context.find_root().command, {}, "clipship", "_CLIPSHIP_COMPLETE")
    text = made.source_template % made.source_vars()
    click.echo(text.replace(_BASH_ADDS, _BASH_JOINS))  # a key goes on with its value, without a space


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
    from trainer.evaluate.suite_table import known_names

    return [CompletionItem(name) for name in known_names() if name.startswith(begun)]
