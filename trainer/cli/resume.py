"""The command `clipship resume`: goes on with a run from its folder alone. Imports no torch."""

import re
import tomllib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainer.cli.options import Command, hosts_option, length_options, nproc_option, run_argument, set_option
from trainer.errors import InputError
from trainer.launch.submission import find_run, read_record
from trainer.run.find import HERE
from trainer.run.layout import ARTEFACTS, COPY_FILE, ENVIRONMENT_FILE, JOB_FILE, RESULT_FILE
from trainer.run.lock import who_holds
from trainer.run.start_job import newest_job, ranks_before, read_start
from trainer.safe_io.plain import read_json, read_plain
from trainer.text.live import progress
from trainer.text.masking import MASK
from trainer.text.paste import word
from trainer.text.terminal import one_line, say
from trainer.text.wording import many

if TYPE_CHECKING:
    from trainer.plan.new_length import NewLength


_LOADS_CODE = re.compile(
    r"(?:LD|DYLD|BASH|OMPI|PMIX|PRTE)_.*|PYTHON.*|(?:.*_)?(?:AUDIT|CACHE|CC|COMMAND|CXX|DIR|ENV|HOME|MODULES?"
    r"|PATH|PLUGIN|PRELOAD|SHELL|STARTUP)"
)
"""Variables by which a process loads code, or looks for it in other places."""


@click.command(cls=Command)
@run_argument
@set_option
@nproc_option
@hosts_option
@length_options
@click.option(
    "--no-check",
    is_flag=True,
    help="Of a run that is submitted again: do not check the data here, if only the cluster's nodes see it.",
)
@click.option(
    "--accept-code",
    is_flag=True,
    help="Of a copy: accept what its job runs as code, by LD_PRELOAD or its like in [env] or by streams.",
)
@click.pass_context
def command(
    context: click.Context,
    run: str,
    overrides: tuple[str, ...],
    nproc: int | None,
    hosts: str | None,
    longer: "NewLength | None",
    shorter: "NewLength | None",
    no_check: bool,
    accept_code: bool,
) -> Any:
    """Go on with RUN from its newest checkpoint: its folder has the job, with every --set.

    RUN is a run folder, a job file, or the name of a run in ./runs. A run that was submitted is submitted
    again, to the same scheduler. One of this machine gets as many ranks as before, unless --nproc or --hosts
    says otherwise.

    RUN may be the copy of a run, in a folder or at an address, which checkpoint.copy_to has made: its newest
    whole checkpoint is fetched into ./runs, and the run goes on there. Who wrote the copy chose its job: the
    names in its [env] are printed.

    Examples:
      clipship resume first-run
      clipship resume runs/first-run --nproc 2
      clipship resume first-run --longer epochs=40
      clipship resume first-run --shorter steps=6000
      clipship resume first-run --set timeouts.eval_s=7200
      clipship resume /scratch/runs/cc3m-vit-b-32 --hosts node1:4,node2:4
      clipship resume s3://bucket/prefix/cc3m-vit-b-32 --nproc 8
    """
    from trainer.cli.run import command as run_here
    from trainer.cli.submit import command as submit
    from trainer.plan.new_length import one_length, with_length

    folder = _fetched(run, accept_code) if _is_copy(run) else find_run(run)
    submission = read_record(folder)
    length = one_length(longer, shorter)
    job_path = _job_path(folder)
    overrides = (*_overrides(folder, job_path, may_be_done=length is not None), *overrides)
    if submission is not None and nproc is None and hosts is None:
        if length is not None:
            overrides, told = with_length(job_path, overrides, length)
            say(told)
        return context.invoke(
            submit,
            job_path=job_path,
            to=submission.to,
            overrides=overrides,
            no_check=no_check,
        )
    if no_check:
        raise InputError(
            "--no-check is for a run that is submitted again: without that, the ranks run here and need the "
            "data here"
        )
    if nproc is None and hosts is None:
        nproc, hosts = _ranks_before(folder)
        say(f"{folder}: goes on with {many(nproc, 'rank') if nproc else hosts}, as before")
    return context.invoke(
        run_here,
        job_path=job_path,
        overrides=overrides,
        nproc=nproc,
        hosts=hosts,
        fresh=False,
        longer=longer,
        shorter=shorter,
    )


def _is_copy(run: str) -> bool:
    """Returns whether RUN is the copy of a run, and not its folder."""
    return "://" in run or (Path(run) / COPY_FILE).is_file()


def _fetched(address: str, accept_code: bool = False) -> Path:
    """Fetches the copy of a run into the folder of its name in ./runs; returns that folder.

    Raises InputError if a run is there already, if no copy of a checkpoint is whole, or if the job lacks a
    secret.
    """
    from trainer.config import is_remote
    from trainer.copies.copied_run import CopiedRun

    address = address.rstrip("/")
    out = HERE / (address.rpartition("/")[2] if is_remote(address) else Path(address).resolve().name)
    if out.exists():
        raise InputError(
            f"{out} is there already: `clipship resume {word(out)}` goes on in it; to fetch {address}, move "
            "it away first"
        )
    with progress(f"fetching {one_line(address)}", "fetched", "byte") as done:
        newest = CopiedRun(address).fetch(out, done, partial(_check_code, address, accept_code))
    say(f"{out}: fetched {newest} from {address}")
    if MASK in read_plain(out / JOB_FILE):
        raise InputError(
            f"{out / JOB_FILE} has {MASK} in place of a secret, which no copy has: write it there, then "
            f"`clipship resume {word(out)}` goes on"
        )
    return out


def _check_code(address: str, accepted: bool, job_file: Path) -> None:
    """Prints the names in [env] of a copy's job. Raises InputError if the job runs code of its own."""
    try:
        job = tomllib.loads(read_plain(job_file))
        env = sorted(dict(job.get("env", {})))
        streams = ["a stream (pipe:COMMAND)"] if "pipe:" in repr(job) else []
    except (TypeError, ValueError, RecursionError) as problem:
        raise InputError(f"{address}: its {JOB_FILE} cannot be read: {problem}") from None
    if env:
        say(f"{address}: its job sets in [env]: {', '.join(env)}")
    found = [*(f"{name} in [env]" for name in env if _LOADS_CODE.fullmatch(name)), *streams]
    if found and not accepted:
        raise InputError(
            f"{address}: its job runs code that whoever wrote the copy has chosen: {', '.join(found)}. If "
            "that was you, give --accept-code."
        )


def _job_path(folder: Path) -> Path:
    """Returns the run's job file: its own, or that of the last start if no rank came to write one.

    Raises InputError if there is nothing to go on with.
    """
    if holder := who_holds(folder):
        raise InputError(f"the run in {folder} is running: {holder} is writing to it")
    start = read_start(folder)
    path = newest_job(folder, folder / ARTEFACTS / start.job if start is not None else None)
    if path is None:
        raise InputError(
            f"{folder} has no {JOB_FILE}, which a run's first rank writes there: start it with its own "
            "job file, by `clipship run` or `clipship submit`"
        )
    return path


def _overrides(folder: Path, job_path: Path, *, may_be_done: bool) -> tuple[str, ...]:
    """Returns what the run's job needs beside its file to go on in this folder.

    Raises InputError if it cannot, or if the run is done.
    """
    from trainer.config.loader import load_job
    from trainer.run.folder import run_folder

    job = load_job(job_path)
    if not may_be_done and not job.checkpoint.longer and (folder / RESULT_FILE).exists():
        raise InputError(
            f"the run in {folder} is done: `clipship status {word(folder)}` shows its result, and "
            "--longer goes on"
        )
    overrides = []
    if job.checkpoint.resume == "never":  # that was meant for the start which made the folder
        overrides.append("checkpoint.resume=auto")
    where = folder.resolve()
    if where.name != job.name:
        raise InputError(
            f"{folder} was renamed: the run is {job.name}, so its folder needs that name to go on"
        )
    if run_folder(job) != where:  # it was moved
        overrides.append(f"logging.runs={where.parent}")
    return tuple(overrides)


def _ranks_before(folder: Path) -> tuple[int | None, str | None]:
    """Returns --nproc and --hosts of the run's last start; one of the two is None.

    Raises InputError if that was on several nodes by another launcher, or if it is not known.
    """
    environment = _environment(folder)
    ranks, hosts = ranks_before(folder, environment)
    if ranks or hosts:
        return ranks or None, hosts or None
    if not environment:
        raise InputError(f"{folder} does not say how many ranks it had: give --nproc or --hosts")
    nodes = [rank["node"] for rank in environment]
    named = ",".join(f"{node}:{nodes.count(node)}" for node in dict.fromkeys(nodes))
    raise InputError(f"the run in {folder} had ranks on other nodes: name them again, as --hosts {named}")


def _environment(folder: Path) -> list[dict[str, str]]:
    """Returns what environment.json says of each rank; nothing if it is missing or broken."""
    try:
        ranks = read_json(folder / ENVIRONMENT_FILE)
        return [{**rank, "node": str(rank["node"])} for rank in ranks]
    except (OSError, ValueError, TypeError, KeyError):
        return []
