"""The command `clipship`. Imports the rest of the package when a command needs it, and never torch.

`--help` is fast because nothing heavy is imported here: no pydantic, no model, no launcher.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.commands import LAZY_COMMANDS
from trainer.cli.json_output import json_option, print_json
from trainer.cli.near import NearChoice, NearGroup
from trainer.cli.new_length import NewLength, length_options, one_length, with_length
from trainer.cli.options import (
    given_hosts,
    hosts_option,
    job_argument,
    nproc_option,
    run_argument,
    set_option,
)
from trainer.cli.presets import check_free, preset_names, preset_summary, schema_line, write_job_file
from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ClusterError,
    InputError,
    MachineError,
    StorageError,
)
from trainer.run.layout import CHECKPOINTS, EXIT_FILE, JOB_FILE, LOGS, RESULT_FILE, Run, rank_log
from trainer.sysinfo.extras import missing_extra
from trainer.text.fitting import fit_to
from trainer.text.live import waiting
from trainer.text.paste import command as paste
from trainer.text.terminal import say, shown

if TYPE_CHECKING:
    from trainer.config import Job
    from trainer.launch.hosts import Host

_ELSEWHERE = (
    "if only the cluster's nodes see the files of the job, use `clipship check --no-data` and `clipship "
    "submit --no-check`"
)


class Commands(NearGroup):
    """A group that imports the modules of LAZY_COMMANDS only when their command is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *LAZY_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LAZY_COMMANDS:
            return super().get_command(ctx, cmd_name)
        return LAZY_COMMANDS[cmd_name]()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name, command.get_short_help_str(formatter.width)) for name, command in self.commands.items()
        ]
        rows += [(name, str(command.__doc__)) for name, command in LAZY_COMMANDS.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _show_version(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version  # slow to import, rarely needed

        try:
            click.echo(f"clipship {version('clipship')}")
        except PackageNotFoundError:
            click.echo("clipship (a checkout that is not installed)")
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
A first run, on made-up pictures:
  clipship init --preset laptop job.toml
  clipship check job.toml
  clipship run job.toml --nproc 2 --set optim.steps=40

Exit codes: 0 done, 1 the run failed, 2 bad input, 75 stopped on request and saved, 124 a phase passed
its time limit, 128 + N ended by signal N without saving (130: Ctrl-C twice).""",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Train CLIP from one job file: on this machine, over ssh, on a cluster."""


@cli.command(
    epilog="""\b
Examples:
  clipship init --list
  clipship init
  clipship init --preset gpu --data shards/
  clipship init --preset laptop --data captions.csv --held-out val.csv
  clipship init --preset slurm cc3m.toml"""
)
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
def init(
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
    """
    if list_only:
        for name in preset_names():
            click.echo(fit_to(sys.stdout, f"{name:<12}{preset_summary(name)}"))
        return
    from trainer.cli.init import ask, job_text, wishes_of
    from trainer.cli.own_data import unwritten

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
    check_free(job_path, force=force)
    for path, text in unwritten(wishes.own.tables if wishes.own else {}).items():
        write_job_file(path, text, force=False)
        say(f"wrote {path}")
    write_job_file(job_path, schema_line() + job_text(wishes, job_path), force=force)
    click.echo(f"wrote {job_path}; next: {paste('clipship', 'check', job_path)}", err=True)


@cli.command(
    epilog="""\b
Examples:
  clipship check job.toml
  clipship check job.toml --nproc 2 --set optim.global_batch_size=256
  clipship check job.toml --no-data    if only the cluster's nodes see the data
  clipship check job.toml --json"""
)
@job_argument
@set_option
@nproc_option
@click.option(
    "--no-data",
    is_flag=True,
    help="Do not open the files that JOB names, if only the cluster's nodes see them.",
)
@json_option("Print one JSON object instead of the table, problems too.")
def check(job_path: Path, overrides: tuple[str, ...], nproc: int | None, no_data: bool, as_json: bool) -> int:
    """Show the run that JOB describes, or every problem with it. Starts and writes nothing.

    The object of --json has `ok`. If it is false, `problems` lists them, and the exit code is 2. Otherwise
    it has name, run_folder, ranks, samples, steps, global_batch_size, batch_size_per_rank,
    micro_batch_size, accumulation, checkpoint_bytes, disk_free_bytes and save_s (from a request to stop to
    the checkpoint); for GPUs gpu_bytes, samples_per_s and hours, which are estimates; warnings; no_effect
    (key -> reason); and rows, the lines of the table by topic. What is not known is null.
    """
    try:
        with waiting(f"checking {job_path}"):
            from trainer.cli.describe import describe

            job, world_size, samples = _checked(job_path, overrides, nproc, image=True, files=not no_data)
    except InputError as problem:
        if not as_json:
            raise
        print_json({"ok": False, "problems": str(problem).splitlines()})
        return exit_code_of(problem)
    local = nproc is not None or not (job.resources.nodes > 1 or job.schedulers)
    if as_json:
        from trainer.cli.check_json import check_fields

        print_json({"ok": True, **check_fields(job, world_size, samples, local=local, files=not no_data)})
    else:
        with waiting(f"checking {job_path}"):
            text = shown(describe(job, world_size, samples, local=local, files=not no_data))
        click.echo(fit_to(sys.stdout, text), nl=False)
    return EXIT_DONE


@cli.command(
    epilog="""\b
Examples:
  clipship run job.toml --nproc 2
  clipship run job.toml --hosts node1:4,node2:4
  clipship run job.toml --nproc 1 --name try-2 --set optim.lr=1e-3
  clipship run job.toml --nproc 2 --longer steps=20000
  clipship run job.toml --nproc 2 --shorter steps=6000

Hosts must accept ssh without a password, and must have the run folder, the data and this \
Python environment at the same paths, as this machine has."""
)
@job_argument
@set_option
@nproc_option
@hosts_option
@click.option("--name", metavar="NAME", help="Name of the run and of its folder, in place of JOB's.")
@length_options
@click.option(
    "--fresh", is_flag=True, help="Move an existing run folder aside (to NAME.old-1) and begin a new run."
)
def run(
    job_path: Path,
    overrides: tuple[str, ...],
    nproc: int | None,
    hosts: str | None,
    fresh: bool,
    longer: NewLength | None = None,
    shorter: NewLength | None = None,
    name: str | None = None,
) -> int:
    """Train JOB here or on hosts over ssh; resumes from the run folder's newest checkpoint."""
    began = time.time()
    with _nothing_started(), waiting(f"checking {job_path}"):
        say(f"reading {job_path}")  # before the imports, which take longer than this
        named_hosts = given_hosts(nproc, hosts)
        length, told = one_length(longer, shorter), ""
        if fresh and length:
            raise InputError(
                f"give either --{length.option} or --fresh: the one goes on with the run, the other begins "
                "anew"
            )
        if name is not None:
            overrides = (*overrides, f"name={name}")
        if length:
            overrides, told = with_length(job_path, overrides, length)
        from trainer.cli.describe import warnings
        from trainer.cli.spare_plan import no_spares_here
        from trainer.launch import local
        from trainer.run.folder import done_text, is_done, run_folder

        job, _, samples = _checked(job_path, overrides, nproc, hosts=named_hosts, fresh=fresh)
    if told:
        say(told)
    if fresh:
        _set_aside(job)
    elif is_done(job):
        click.echo(fit_to(sys.stdout, f"{'result':<12} {shown(done_text(Run(run_folder(job))))}"))
        return EXIT_DONE
    spares = no_spares_here(job) if named_hosts is None else ()
    for warning in (*spares, *warnings(job, samples, local=True)):
        say(f"warning: {warning}")
    return local.run(job, nproc=nproc, hosts=named_hosts, began=began)


@cli.command(
    epilog="""\b
Examples:
  torchrun --nproc-per-node 4 --no-python clipship train job.toml
  srun clipship train job.toml"""
)
@job_argument
@set_option
def train(job_path: Path, overrides: tuple[str, ...]) -> int:
    """Run one rank of JOB; a launcher starts it once for each rank."""
    from trainer.train.main import main as run_rank  # the one import that brings torch

    return run_rank(job_path, overrides)


@cli.command(
    epilog="""\b
Examples:
  clipship checkpoint runs/first-run"""
)
@run_argument
def checkpoint(run: str) -> None:
    """Ask RUN to save a checkpoint now and to go on.

    RUN is a run folder, a job file, or the name of a run in ./runs.
    """
    from trainer.launch.submission import find_run
    from trainer.run.layout import CHECKPOINT_REQUEST
    from trainer.run.lock import who_holds

    run_folder = find_run(run)
    if not (run_folder / JOB_FILE).is_file():
        raise InputError(f"{run_folder} is not a run folder: it has no job.toml")
    if (run_folder / RESULT_FILE).exists():
        raise InputError(
            f"the run in {run_folder} has ended; its checkpoints are in {run_folder / CHECKPOINTS}"
        )
    if (run_folder / EXIT_FILE).exists() and who_holds(run_folder) is None:
        raise InputError(
            f"the run in {run_folder} is not running: `clipship status` says how its last start ended"
        )
    try:
        (run_folder / CHECKPOINT_REQUEST).touch()
    except OSError as problem:
        raise InputError(
            f"{run_folder}: the request cannot be written there: {problem.strerror}; does the run belong to "
            "another user?"
        ) from None
    click.echo(
        f"requested; the log names the checkpoint once it is written: {run_folder / LOGS / rank_log(0)}",
        err=True,
    )


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


def _checked(
    job_path: Path,
    overrides: Sequence[str],
    ranks: int | None,
    *,
    hosts: "Sequence[Host] | None" = None,
    image: bool = False,
    files: bool = True,
    fresh: bool = False,
) -> tuple["Job", int, int | None]:
    """Returns the job, its world size and the number of samples, None if not known.

    `hosts` are those of --hosts, in place of `ranks`; `image` checks its image, batch script and MPIJob too;
    `files` opens the files that it names; `fresh` means that its run folder will be a new one. Raises
    InputError that lists every problem.
    """
    from trainer.cli.check import check_job, check_without_files, problems_of
    from trainer.config.loader import load_job
    from trainer.launch.local import ranks_of

    job = load_job(job_path, overrides)
    world_size = ranks_of(job, ranks, hosts)
    problems: list[str] = []
    samples = None
    try:
        samples = check_job(job, world_size, fresh=fresh) if files else check_without_files(job, world_size)
    except InputError as problem:
        problems.append(str(problem))
        if image and files and job.schedulers:
            problems.append(_ELSEWHERE)
    if image and ranks is not None:
        from trainer.cli.device_plan import no_gpu_here

        problems += no_gpu_here(job, local=True)  # without --nproc another machine may be meant
    if image:
        problems += problems_of(
            partial(job_check, job) for job_check in _submission_checks(job, ranks, files=files)
        )
    if problems:
        raise InputError("\n".join(dict.fromkeys("\n".join(problems).splitlines())))
    return job, world_size, samples


def _submission_checks(job: "Job", ranks: int | None, *, files: bool) -> "Iterator[Callable[[Job], object]]":
    """Yields the checks of the job's image and of its schedulers; each of them raises InputError."""
    if job.model_fields_set & {"image", "stack"}:
        from trainer.image.compatibility import check_stack

        yield check_stack
    # an image with a digest is built already
    if files and job.image.tag is not None and "@" not in job.image.tag:
        from trainer.image.context import check_files

        yield lambda job: check_files(job.image.site)
    from trainer.launch.schedulers import scheduler

    for name in job.schedulers if ranks is None else ():
        yield scheduler(name).validate


def exit_code_of(problem: InputError) -> int:
    """Returns the exit code of a command that a problem ends: a full disk is no fault of the input."""
    return EXIT_FAILED if isinstance(problem, StorageError) else EXIT_BAD_INPUT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Bad input gives one message on stderr; a bug keeps its traceback.
    """
    try:
        code = cli.main(arguments, prog_name="clipship", standalone_mode=False)
    except InputError as problem:
        say(problem)
        return exit_code_of(problem)
    except (ClusterError, MachineError) as problem:
        say(problem)
        return EXIT_FAILED
    except click.ClickException as problem:
        problem.show()
        return EXIT_BAD_INPUT
    except ModuleNotFoundError as missing:
        if not (text := missing_extra(missing.name or "")):
            raise
        say(text)
        return EXIT_BAD_INPUT
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of stdout has left (`clipship check job.toml | head -1`)
        return EXIT_FAILED
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
