"""The Dockerfile of a job. Pure: no clock, no network, no daemon. Every value passes a filter that makes it data."""

import shlex
from collections.abc import Iterable

from trainer.job import Job
from trainer.launch.image.recipe import recipe
from trainer.launch.templates import template


def dockerfile(job: Job) -> str:
    """The text that `docker build` takes. Raises InputError listing what cannot work."""
    return template("docker", "Dockerfile.j2", {"text": quoted, "words": words, "shell": shlex.quote}).render(recipe=recipe(job))


def quoted(value: str) -> str:
    """A double-quoted word of a Dockerfile's ENV or LABEL: backslash, quote and dollar are the value's own."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def words(values: Iterable[str]) -> str:
    """Words of a shell's command line."""
    return " ".join(shlex.quote(value) for value in values)
