"""The command `clipship check`: says what a job would do. Imports no torch."""

from pathlib import Path

import click

from trainer.cli.options import Command, job_argument, json_option, nproc_option, set_option
from trainer.cli.output import print_json, print_lines
from trainer.errors import EXIT_DONE, InputError, exit_code_of
from trainer.text.live import waiting
from trainer.text.terminal import shown


@click.command(cls=Command)
@job_argument
@set_option
@nproc_option
@click.option(
    "--no-data",
    is_flag=True,
    help="Do not open the files that JOB names, if only the cluster's nodes see them.",
)
@json_option("Print one JSON object instead of the table, problems too.")
def command(
    job_path: Path, overrides: tuple[str, ...], nproc: int | None, no_data: bool, as_json: bool
) -> int:
    """Show the run that JOB describes, or every problem with it. Starts nothing and leaves nothing behind.

    The object of --json has `ok`. If it is false, `problems` lists them, and the exit code is 2. Otherwise
    it has name, run_folder, ranks, samples, steps, global_batch_size, batch_size_per_rank,
    micro_batch_size, accumulation, checkpoint_bytes, disk_free_bytes and save_s (from a request to stop to
    the checkpoint); for GPUs the estimates gpu_bytes, samples_per_s and hours, and on a cluster step_s and
    efficiency (share of its speed alone that each GPU keeps); warnings; no_effect (key -> reason); and rows,
    the lines of the table by topic. What is not known is null. A job with [[stage]] has stages, a list with
    the steps, global_batch_size and estimates of each later one.

    Examples:
      clipship check job.toml
      clipship check job.toml --nproc 2 --set optim.global_batch_size=256
      clipship check job.toml --no-data    if only the cluster's nodes see the data
      clipship check job.toml --json
    """
    try:
        with waiting(f"checking {job_path}"):
            from trainer.plan.check import checked
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
        print_lines(text.splitlines())
    return EXIT_DONE
