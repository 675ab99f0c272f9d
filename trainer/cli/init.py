"""The command `clipship init`: writes the first job file of a user. Imports no torch."""

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from trainer.cli.options import Command, NearChoice
from trainer.cli.output import print_lines
from trainer.errors import InputError
from trainer.presets.files import (
    check_free,
    preset_names,
    preset_summary,
    preset_text,
    schema_line,
    write_job_file,
)
from trainer.presets.wishes import NONE, Wishes, data_pattern, job_text, own_data, unwritten, wishes_of
from trainer.run.layout import JOB_FILE
from trainer.text.paste import command as paste
from trainer.text.table import by_topic
from trainer.text.terminal import say

_DOORS = ("here", "slurm", "kubernetes")


@click.command(cls=Command)
@click.argument("job_path", metavar="[JOB]", type=click.Path(path_type=Path), default=JOB_FILE)
@click.option("--preset", type=NearChoice(preset_names()), help="Example to write.")
@click.option(
    "--data",
    metavar="PATH",
    default="",
    help="Shards, a table or a folder that has them, to train from, in JOB.",
)
@click.option(
    "--held-out",
    metavar="PATH",
    default="",
    help="Pairs to evaluate on; none: no evaluation. Without it, a twentieth of the data, 1,000 at most.",
)
@click.option(
    "--no-data",
    is_flag=True,
    help="Take --data and --held-out as they are, if only the cluster's nodes see them.",
)
@click.option("--list", "list_only", is_flag=True, help="List the presets and write nothing.")
@click.option("--force", is_flag=True, help="Replace JOB if it exists; tables are never replaced.")
def command(
    job_path: Path,
    preset: str | None,
    data: str,
    held_out: str,
    no_data: bool,
    list_only: bool,
    force: bool,
) -> None:
    """Write a commented job file to start from (default: job.toml).

    In a terminal and without --preset, questions choose it: place, data, GPUs, model. Batch, length and name
    follow the data; a table is cut into two beside JOB, one to train on and one to evaluate on.

    Examples:
      clipship init --list
      clipship init
      clipship init --preset gpu --data shards/
      clipship init --preset laptop --data captions.csv --held-out val.csv
      clipship init --preset slurm cc3m.toml
    """
    if list_only:
        print_lines(by_topic((name, preset_summary(name)) for name in preset_names()))
        return
    if preset is not None:
        wishes = wishes_of(preset, data, held_out, job_path, here=not no_data)
    elif sys.stdin.isatty() and sys.stderr.isatty():
        check_free(job_path, force=force)
        wishes = ask(job_path, data, held_out, here=not no_data)
    else:
        raise InputError(
            f"no preset is chosen: give --preset with one of {', '.join(preset_names())}; `clipship init "
            "--list` describes them"
        )
    job = schema_line() + job_text(wishes, job_path)
    check_free(job_path, force=force, text=job)
    for path, text in unwritten(wishes.own.tables if wishes.own else {}).items():
        write_job_file(path, text, force=False)
        say(f"wrote {path}")
    write_job_file(job_path, job, force=force)
    click.echo(f"wrote {job_path}; next: {paste('clipship', 'check', job_path)}", err=True)


def gpus_here() -> int:
    """Returns the number of NVIDIA GPUs whose device files this machine has."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def ask(job_path: Path, given: str = "", held_out: str = "", *, here: bool = True) -> Wishes:
    """Asks in the terminal for the place, the data, the held-out data, GPUs and the model.

    What is given is not asked for. `here` is false if only a cluster's nodes see the data.
    """
    click.echo("Enter takes the answer in brackets.", err=True)
    question = "Data: shards (shards/) or a table (captions.csv); nothing: made-up pictures"
    second = f"Held-out pairs to evaluate on; nothing: a part of the data; {NONE}: no evaluation"

    def pattern_of(answer: str) -> str:
        return data_pattern(answer, job_path, here=here) if answer not in ("", NONE) else answer

    door = _asked("Where it runs", "here", NearChoice(_DOORS))
    pattern = pattern_of(given) if given else str(_asked(question, "", _checked(pattern_of)))
    if pattern and not held_out:
        held_out = str(_asked(second, "", _checked(pattern_of)))
    else:
        held_out = pattern_of(held_out)
    own = own_data(pattern, held_out, job_path, here=here) if pattern else None
    usual_gpus = (
        gpus_here() if door == "here" else tomllib.loads(preset_text(door))["resources"]["gpus_per_node"]
    )
    gpus = int(_asked("GPUs on each node", str(usual_gpus), click.IntRange(0, 64)))
    preset = door if door != "here" else "gpu" if gpus and pattern else "laptop"
    usual = tomllib.loads(preset_text(preset))["model"]["name"]

    def known(name: str) -> str:
        from trainer.model.catalog import check_model  # it imports pydantic

        check_model(str(job_path.parent / name) if name.endswith(".json") else name)
        return name

    model = _asked("Model, as open_clip names it", usual, _checked(known))
    return Wishes(preset, pattern, gpus or None, model, own)


def _checked(convert: Callable[[str], str]) -> Callable[[str], str]:
    """Returns the function as click takes it: after an answer that it refuses, the question comes again."""

    def converted(answer: str) -> str:
        try:
            return convert(answer.strip())
        except InputError as problem:
            raise click.UsageError(str(problem)) from None

    return converted


def _asked(
    question: str, default: str, kind: "click.ParamType[Any] | Callable[[str], str] | None" = None
) -> str:
    typed = {"type": kind} if isinstance(kind, click.ParamType) else {"value_proc": kind}
    answer = click.prompt(question, default=default, show_default=bool(default), err=True, **typed)
    return str(answer).strip()
