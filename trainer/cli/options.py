"""Arguments that several commands take, with one meaning and one help text. Imports no torch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainer.cli import suggested
from trainer.errors import InputError

if TYPE_CHECKING:
    from trainer.launch.hosts import Host

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

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
    from trainer.config.typed import from_here  # it imports pydantic

    return from_here(texts)


set_option = set_of("of the job file, e.g. optim.lr=1e-3; an empty value restores the default.")
nproc_option: Decorator = click.option(
    "--nproc",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of ranks on this machine; without it, as [resources] says.",
)
hosts_option: Decorator = click.option(
    "--hosts", metavar="HOST:N,...", help="Hosts to start ranks on over ssh, each with its number of ranks."
)

weights_model_option: Decorator = click.option(
    "--model",
    metavar="NAME",
    help="Model of the weights: a name of open_clip, or a config file; Clipship's checkpoints know theirs.",
)


def processes_option(work: str) -> Decorator:
    """Returns the option --processes of a command whose processes do this work, such as "read headers"."""
    return click.option(
        "--processes",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"Number of processes that {work}. [default: one for each core]",
    )


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
