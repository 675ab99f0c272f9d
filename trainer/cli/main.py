"""The command `clipship`. Imports the rest of the package when a command needs it, and never torch.

`--help` is fast because nothing heavy is imported here: no pydantic, no model, no launcher.
"""

import importlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

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

LAZY_COMMANDS = {
    "explain": (
        "trainer.cli.explain:command",
        "Say what a key of the job file means: type, unit, default, range.",
    ),
    "doctor": (
        "trainer.cli.doctor:command",
        "Check nodes, collectives, network and GPUs as a run would, without training.",
    ),
    "resume": ("trainer.cli.resume:command", "Go on with a run: its folder has all that it takes."),
    "sweep": (
        "trainer.cli.sweep.command:command",
        "Train a job once for each combination of values, with a table of results.",
    ),
    "clone": ("trainer.cli.clone:command", "Write the job file of a run, to change it and start again."),
    "render": ("trainer.cli.render:command", "Print what a job would build or submit."),
    "submit": ("trainer.cli.submit:command", "Submit a job to Slurm or Kubernetes."),
    "status": (
        "trainer.cli.status:command",
        "Show how a run is doing: its state, step, speed, last checkpoint.",
    ),
    "runs": (
        "trainer.cli.runs:command",
        "List your runs: where they run, state, step, time left, last line.",
    ),
    "logs": ("trainer.cli.logs:command", "Show the output of a run's ranks."),
    "cancel": ("trainer.cli.cancel:command", "End a run that was submitted."),
    "eval": (
        "trainer.cli.evaluate:command",
        "Evaluate a checkpoint, ours or open_clip's: retrieval, zero-shot classification.",
    ),
    "search": (
        "trainer.cli.search:command",
        "Find the pictures of a folder that are nearest to a text, on a page on this machine.",
    ),
    "fetch": (
        "trainer.cli.fetch:command",
        "Download what a job names on a hub: weights, tokenizer, text tower.",
    ),
    "export": (
        "trainer.cli.export:command",
        "Write a trained model for open_clip or transformers, with a model card.",
    ),
    "import": (
        "trainer.cli.import_weights:command",
        "Convert weights of Chinese-CLIP or transformers for model.pretrained.",
    ),
    "image": ("trainer.cli.image:command", "Build, verify and publish the container image of a job."),
    "data": ("trainer.cli.data:command", "Inspect shards: statistics, a contact sheet."),
    "index": (
        "trainer.cli.index:command",
        "Index shards, so that runs need not read their headers.",
    ),
    "pack": ("trainer.cli.pack:command", "Pack a table of images and captions into WebDataset shards."),
    "from-open-clip": (
        "trainer.cli.from_open_clip.command:command",
        "Print the job file of a command line of open_clip_train.",
    ),
    "report": (
        "trainer.cli.report:command",
        "Write one HTML page about a run, or comparing several: curves, evaluation, what went wrong.",
    ),
    "completion": (
        "trainer.cli.completion:command",
        "Print the script that completes commands, runs and keys in your shell.",
    ),
    "diff": ("trainer.cli.diff:command", "Show in what runs differ: job, data, environment, results."),
    "plan": (
        "trainer.cli.plan:command",
        "Say what to expect of a run: useful time, checkpoint interval, spare nodes.",
    ),
    "fabrics": (
        "trainer.cli.fabrics:command",
        "List networks between nodes, and what a job gets for each.",
    ),
    "stacks": (
        "trainer.cli.stacks:command",
        "List versions that go together: torch, CUDA, NCCL, Python, compilers.",
    ),
}
"""Commands in modules of their own: name -> ("module:attribute" of a click command, its line in `clipship
--help`)."""


class Commands(NearGroup):
    """A group that imports the modules of LAZY_COMMANDS only when their command is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *LAZY_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LAZY_COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = LAZY_COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name, command.get_short_help_str(formatter.width)) for name, command in self.commands.items()
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows + [(name, summary) for name, (_, summary) in LAZY_COMMANDS.items()])


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
            from trainer.plan.checked import checked
            from trainer.plan.describe import describe

            job, world_size, samples = checked(job_path, overrides, nproc, image=True, files=not no_data)
    except InputError as problem:
        if not as_json:
            raise
        print_json({"ok": False, "problems": str(problem).splitlines()})
        return exit_code_of(problem)
    local = nproc is not None or not (job.resources.nodes > 1 or job.schedulers)
    if as_json:
        from trainer.plan.check_json import check_fields

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
        from trainer.launch import local
        from trainer.plan.checked import checked
        from trainer.plan.describe import warnings
        from trainer.plan.spares import no_spares_here
        from trainer.run.folder import done_text, is_done, run_folder

        job, _, samples = checked(job_path, overrides, nproc, hosts=named_hosts, fresh=fresh)
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
