"""Arguments that several commands take, with one meaning and one help text. Imports no torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainer.cli import suggested
from trainer.errors import InputError

if TYPE_CHECKING:
    from trainer.config import Data
    from trainer.launch.hosts import Host
    from trainer.plan.new_length import NewLength

_EXAMPLES = "\n\nExamples:\n"

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Examples:
    """A command whose docstring may end with examples, which its help shows behind its options."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        text, found, examples = cleandoc(settings.get("help") or "").partition(_EXAMPLES)
        if found:
            settings |= {"help": text, "epilog": f"\b{_EXAMPLES[1:]}{examples}"}
        super().__init__(*args, **settings)


class Command(_Examples, click.Command):
    """A command with examples."""


class Group(_Examples, click.Group):
    """A group of commands with examples."""

    command_class = Command


class NearGroup(Group):
    """A group of commands whose message about an unknown one names those that are near."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, known = args[0], self.list_commands(ctx)
        if name[:1].isalnum() and name not in known and not ctx.resilient_parsing:
            ctx.fail(f"No such command '{name}'{_hint(name, known) or '.'}")
        return super().resolve_command(ctx, args)


class NearChoice(click.Choice[str]):
    """A choice whose message about another value names those that are near."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        known = list(map(str, self.choices))
        if value in known:
            return str(value)
        allowed = ", ".join(f"'{each}'" for each in known)
        return self.fail(f"'{value}' is not one of {allowed}{_hint(str(value), known)}", param, ctx)


class Finite(click.FloatRange):
    """A number within limits: neither infinity nor NaN, which no limit refuses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


def _hint(given: str, known: list[str]) -> str:
    from trainer.text.near import did_you_mean  # rarely needed

    return did_you_mean(given, known)


job_argument: Decorator = click.argument("job_path", metavar="JOB", type=click.Path(path_type=Path))


run_argument: Decorator = click.argument("run", metavar="RUN", shell_complete=suggested.runs)
"""Name of a run, which `trainer.launch.submission.find_run` reads."""


def set_of(what: str) -> Decorator:
    """Returns the option --set, whose help says what it changes; its relative paths become absolute."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_from_here,
        shell_complete=suggested.keys,
        help=f"Change a key {what} May be repeated. A relative path starts at the current folder.",
    )


def _from_here(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    if not texts:
        return ()
    from trainer.config.loader import from_here  # it imports pydantic

    return from_here(texts)


set_option = set_of("of the job file, e.g. optim.lr=1e-3; an empty value restores the default.")


def count_option(
    name: str, says: str, default: int | None = None, most: int | None = None, metavar: str = "N"
) -> Decorator:
    """Returns an option whose value is a whole number, 1 or more."""
    kind = click.IntRange(min=1, max=most)
    return click.option(name, type=kind, default=default, show_default=True, metavar=metavar, help=says)


nproc_option: Decorator = count_option(
    "--nproc", "Number of ranks on this machine; without it, as [resources] says."
)
hosts_option: Decorator = click.option(
    "--hosts", metavar="HOST:N,...", help="Hosts to start ranks on over ssh, each with its number of ranks."
)


def json_option(says: str) -> Decorator:
    """Returns the option --json of a command, which passes it as `as_json`; `says` is its help."""
    return click.option("--json", "as_json", is_flag=True, help=says)


def length_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --longer and --shorter to a command: `longer` and `shorter`, each a NewLength or None."""
    helps = {
        "longer": "Go on to this length of the whole run, also if the run is done; steps=N or epochs=N.",
        "shorter": "End the run at this length: from its newest checkpoint on the learning rate falls to "
        "optim.min_lr.",
    }
    for name in reversed(helps):
        command = click.option(f"--{name}", metavar="steps=N", callback=_length, help=helps[name])(command)
    return command


def _length(_context: click.Context, option: click.Parameter, text: str | None) -> "NewLength | None":
    from trainer.plan.new_length import read_length  # it imports pydantic

    return None if text is None else read_length(str(option.name), text)


weights_model_option: Decorator = click.option(
    "--model",
    metavar="NAME",
    help="Model of the weights: a name of open_clip, or a config file; Clipship's checkpoints know theirs.",
)


def processes_option(work: str, default: str = "one for each core") -> Decorator:
    """Returns the option --processes of a command whose processes do this work, such as "read headers"."""
    return count_option("--processes", f"Number of processes that {work}. [default: {default}]")


def given_hosts(nproc: int | None, hosts: str | None) -> "Sequence[Host] | None":
    """Returns the hosts of --hosts; None without that option.

    Raises InputError if --nproc is given too, or if the hosts cannot be read.
    """
    from trainer.launch.hosts import parse_hosts

    if nproc is not None and hosts is not None:
        raise InputError(
            "give either --nproc or --hosts: --nproc starts ranks on this machine, --hosts on the named hosts"
        )
    return None if hosts is None else parse_hosts(hosts)


DataOf = Callable[[Sequence[str]], "Data"]
"""Function from files to the section `[data]` that names them, with the values of a command's options."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "image_key": {"multiple": True, "metavar": "ENDING"},
    "caption_key": {"multiple": True, "metavar": "KEY", "help": "[default: txt]"},
    "caption_lines": {"metavar": "several|one", "help": "[default: several]"},
    "caption_template": {"multiple": True, "metavar": "TEXT"},
    "empty_captions": {
        "multiple": True,
        "metavar": "TEXT",
        "help": "[default: nan, None, null and their like]",
    },
    "filters": {"multiple": True, "metavar": "FILTER"},
    "scores": {"multiple": True, "metavar": "FILE"},
    "scores_by": {"metavar": "NAME", "help": "[default: key]"},
    "group_by": {"metavar": "NAME"},
    "image_column": {"metavar": "NAME", "help": "[default: image]"},
    "caption_column": {"multiple": True, "metavar": "NAME", "help": "[default: caption]"},
    "separator": {"metavar": "CHARACTER", "help": "[default: a comma for .csv, a tab for .tsv]"},
    "quotes": {"metavar": "cells|text", "help": "[default: cells]"},
    "encoding": {"metavar": "NAME", "help": "[default: utf-8]"},
}
"""Settings of click for an option, by the key of `[data]` that it stands for."""


def data_options(*keys: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that adds options for the keys, and gives the command `data`, from them.

    `data` is a function from the files to the `Data`, which raises InputError for a value that no job may
    have.
    """

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_data(**arguments: Any) -> Any:
            given = {key: arguments.pop(key) for key in keys}
            return command(**arguments, data=lambda files: _data(files, given))

        result: Callable[..., Any] = with_data
        for key in reversed(keys):
            result = _option(key)(result)
        return result

    return decorated


def _option(key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    settings = _OPTIONS[key]
    again = " May be repeated." if settings.get("multiple") else ""
    words = f"As data.{key} in a job file.{again} {settings.get('help', '')}".strip()
    return click.option(f"--{key.replace('_', '-')}", **{**settings, "help": words})


def _data(files: Sequence[str], given: Mapping[str, Any]) -> "Data":
    from pydantic import ValidationError

    from trainer.config import Data
    from trainer.config.messages import problem_texts
    from trainer.config.types import Section

    class Options(Section):
        """The values of the options, where a job file would have them."""

        data: Data

    values = {key: value for key, value in given.items() if value}
    if "encoding" in values:
        values["encoding"] = values["encoding"].lower()
    try:
        return Options.model_validate({"data": {**values, "train": tuple(files)}}).data
    except ValidationError as error:
        raise InputError("\n".join(_named(key, text) for key, text in problem_texts(error))) from None


def _named(key: Sequence[str], text: str) -> str:
    option = f"--{key[-1].replace('_', '-')}: " if key and key[-1] in _OPTIONS else ""
    return f"{option}{text}"
