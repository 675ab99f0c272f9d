"""Arguments that several commands take, with one meaning and one help text. Imports no torch."""

import math
from collections.abc import Callable, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainer.cli import suggested
from trainer.errors import InputError

if TYPE_CHECKING:
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
