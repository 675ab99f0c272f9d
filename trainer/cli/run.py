"""The command `clipship run`: trains on this machine, or on hosts over ssh. Imports no torch."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import (
    Command,
    given_hosts,
    hosts_option,
    job_argument,
    length_options,
    nproc_option,
    set_option,
)
from trainer.cli.output import print_lines
from trainer.errors import EXIT_DONE, InputError
from trainer.run.layout import Run
from trainer.run.lock import refuse_second_start
from trainer.text.live import waiting
from trainer.text.table import by_topic
from trainer.text.terminal import say, shown

if TYPE_CHECKING:
    from trainer.config import Job
    from trainer.plan.new_length import NewLength


@click.command(cls=Command)
@job_argument
@set_option
@nproc_option
@hosts_option
@click.option("--name", metavar="NAME", help="Name of the run and of its folder, in place of JOB's.")
@length_options
@click.option(
    "--fresh", is_flag=True, help="Move an existing run folder aside (to NAME.old-1) and begin a new run."
)
def command(
    job_path: Path,
    overrides: tuple[str, ...],
    nproc: int | None,
    hosts: str | None,
    fresh: bool,
    longer: "NewLength | None" = None,
    shorter: "NewLength | None" = None,
    name: str | None = None,
) -> int:
    """Train JOB here or on hosts over ssh; resumes from the run folder's newest checkpoint.

    Examples:
      clipship run job.toml --nproc 2
      clipship run job.toml --hosts node1:4,node2:4
      clipship run job.toml --nproc 1 --name try-2 --set optim.lr=1e-3
      clipship run job.toml --nproc 2 --longer steps=20000
      clipship run job.toml --nproc 2 --shorter steps=6000

    Hosts must accept ssh without a password, and must have the run folder, the data and this Python
    environment at the same paths, as this machine has.
    """
    began = time.time()
    with _nothing_started(), waiting(f"checking {job_path}"):
        say(f"reading {job_path}")  # before the imports, which take longer than this
        from trainer.config.tables import toml_text
        from trainer.plan.new_length import one_length, with_length

        named_hosts = given_hosts(nproc, hosts)
        length, told = one_length(longer, shorter), ""
        if fresh and length:
            raise InputError(
                f"give either --{length.option} or --fresh: the one goes on with the run, the other begins "
                "anew"
            )
        if name is not None:
            overrides = (*overrides, f"name={toml_text(name)}")
        if length:
            overrides, told = with_length(job_path, overrides, length)
        from trainer.launch import local
        from trainer.plan.check import checked
        from trainer.plan.describe import warnings
        from trainer.plan.spares import no_spares
        from trainer.run.folder import done_text, is_done, run_folder

        job, _, samples = checked(job_path, overrides, nproc, hosts=named_hosts, fresh=fresh)
    if told:
        say(told)
    if fresh:
        _set_aside(job)
    elif is_done(job):
        print_lines(by_topic([("result", shown(done_text(Run(run_folder(job)), job)))], 13))
        return EXIT_DONE
    refuse_second_start(run_folder(job))
    spares = no_spares(job, local=True) if named_hosts is None else ()
    for warning in (*spares, *warnings(job, samples, local=True)):
        say(f"warning: {warning}")
    return local.run(job, nproc=nproc, hosts=named_hosts, began=began)


@contextmanager
def _nothing_started() -> Iterator[None]:
    """Lets Ctrl-C in the block say that nothing was started."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("\nclipship: Ctrl-C: nothing was started", err=True)
        raise


def _set_aside(job: "Job") -> None:
    from trainer.run.folder import move_aside, run_folder

    folder = run_folder(job)
    if folder.exists():
        say(f"the previous run is now {move_aside(folder)}")
