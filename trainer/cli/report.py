"""The command `clipship report`. Imports no torch."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from trainer.cli import suggested
from trainer.cli.options import Command
from trainer.errors import InputError
from trainer.run.sweep_record import is_sweep
from trainer.text.terminal import say, shown


@click.command(cls=Command)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, shell_complete=suggested.runs)
@click.option(
    "--output",
    metavar="FILE",
    help="File, or address such as s3://bucket/first-run.html, that gets the page; without it, "
    "RUN/report.html, and for several runs comparison.html beside the first one, and for a sweep sweep.html "
    "in its folder.",
)
@click.option(
    "--watch",
    is_flag=True,
    help="Write the page again every 5 seconds until all runs have ended. A browser that shows it keeps up. "
    "A run that waits in a queue is waited for.",
)
def command(runs: Sequence[str], output: str | None, watch: bool) -> None:
    """Write one HTML page about RUN, finished or not, or one that compares several runs.

    RUN is a run folder, a job file, or the name of a run in ./runs. The page shows loss, speed, evaluation
    over time, the time of the run by cause, its restarts, the environment and what went wrong. With several
    runs, it lays their curves over each other and lists the keys and packages that differ. For the folder of
    a sweep, it is a table of its runs with the best results marked, and their curves. It loads nothing from
    elsewhere, so it can be sent as it is. Its path goes to stdout.

    Examples:
      clipship report runs/first-run
      clipship report runs/first-run --output first-run.html
      clipship report runs/first-run --output s3://bucket/first-run.html
      clipship report runs/first-run --watch
      clipship report first-run try-2 try-3
      clipship report runs/first-run-sweep
    """
    from trainer.launch.submission import find_run
    from trainer.report import watch as watching
    from trainer.report.compare import write_comparison
    from trainer.report.page import write_report
    from trainer.report.sweep import write_sweep

    sweep = _sweep(runs)
    folders = [] if sweep else [find_run(run) for run in runs]
    if watch and (queued := [folder for folder in folders if _is_queued(folder)]):
        names = ", ".join(map(str, queued))
        say(f"no rank has started yet: {names}. The page comes as soon as one has; Ctrl-C ends the wait.")
        watching.wait_for(lambda: not any(map(_is_queued, queued)), time.sleep)

    def page(reload_s: float | None, path: Path | None) -> Path:
        if sweep:
            return write_sweep(sweep, path, reload_s)
        if len(folders) > 1:
            return write_comparison(folders, path, reload_s)
        return write_report(folders[0], path, reload_s)

    def write(reload_s: float | None) -> Path | str:
        if output is None or "://" not in output:
            return page(reload_s, Path(output) if output else None)
        return _written_there(output, lambda path: page(reload_s, path))

    path = write(watching.EVERY_S if watch else None)
    click.echo(path)
    if watch:
        say(f"Open {shown(str(path))} in a browser. It is kept up to date until the run ends or Ctrl-C.")
        watching.watch(write, lambda: any(map(_goes_on, _now(sweep, folders))), time.sleep)


def _written_there(address: str, page: Callable[[Path], Path]) -> str:
    """Writes a page to an address, of which a browser gets it as a page; returns the address."""
    from trainer.data.store import put

    with tempfile.TemporaryDirectory() as aside:
        put(page(Path(aside, "page.html")), address)
    return address


def _sweep(names: Sequence[str]) -> Path | None:
    """Returns the folder of the sweep that is named; None if runs are. Raises InputError for both at once."""
    sweeps = [path for name in names for path in (Path(name), Path("runs", name)) if is_sweep(path)]
    if sweeps and len(names) > 1:
        raise InputError(f"{sweeps[0]} is the folder of a sweep: it has a page of its own, so name it alone")
    return sweeps[0] if sweeps else None


def _now(sweep: Path | None, folders: Sequence[Path]) -> Sequence[Path]:
    """Returns the runs that the page is about: those of a sweep become more."""
    from trainer.report.sweep import existing_runs

    return existing_runs(sweep) if sweep else folders


def _is_queued(folder: Path) -> bool:
    """Returns whether the run was submitted and no rank of it has started."""
    from trainer.launch.submission import read_record
    from trainer.report.folder import has_started

    return not has_started(folder) and read_record(folder) is not None


def _goes_on(folder: Path) -> bool:
    """Returns whether a run may still write something, as its folder shows it."""
    from trainer.report.folder import has_started, read_run
    from trainer.report.liveness import inspect

    if not has_started(folder):
        return _is_queued(folder)
    return inspect(folder, read_run(folder, recent=True)).state not in ("ended", "dead")
