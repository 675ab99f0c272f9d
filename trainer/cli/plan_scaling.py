"""The command `clipship plan scaling`: what more GPUs bring, by a model of the network. Imports no torch."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import Command, NearChoice, job_argument, json_option, set_option
from trainer.cli.output import print_json
from trainer.config.fabric_rates import FABRIC_RATES
from trainer.config.gpus import GPUS
from trainer.config.loss_tile import TILE
from trainer.config.losses import LOSSES
from trainer.text.table import by_topic
from trainer.text.wording import many

if TYPE_CHECKING:
    from trainer.config import Job
    from trainer.estimate.scaling import Scaling

_PAGE = "docs/performance.md"
_DEFAULT_GPU = "H100"


@click.command(cls=Command)
@job_argument
@set_option
@click.option("--gpus", type=click.IntRange(min=1), default=1024, show_default=True, help="Most GPUs.")
@click.option(
    "--per-gpu",
    type=click.IntRange(min=1),
    help="Samples of each GPU in a step. [default: the job's global batch divided by its GPUs]",
)
@click.option(
    "--gpu", type=NearChoice(list(GPUS)), help="Kind of GPU. [default: the job's resources.gpu, or H100]"
)
@click.option(
    "--fabric",
    type=NearChoice(list(FABRIC_RATES)),
    default="NDR",
    show_default=True,
    help="Network of the nodes.",
)
@json_option("Print one line of JSON instead of the table.")
def scaling(
    job_path: Path,
    overrides: tuple[str, ...],
    gpus: int,
    per_gpu: int | None,
    gpu: str | None,
    fabric: str,
    as_json: bool,
) -> None:
    """Estimate the weak scaling of JOB: the same samples on each GPU, on ever more of them.

    Nothing is measured: peak rates of GPU and network, and what of each collective a step can hide. Nodes
    have eight GPUs.

    Examples:
      clipship plan scaling job.toml --fabric NDR --gpus 1024
      clipship plan scaling job.toml --per-gpu 256 --gpu A100-80GB --fabric HDR --json
    """
    from trainer.config.loader import load_job
    from trainer.estimate.scaling import on_all_backends

    job = load_job(job_path, overrides)
    each = per_gpu or max(1, job.optim.global_batch_size // job.resources.world_size)
    name = gpu or job.resources.gpu or _DEFAULT_GPU
    rows = list(on_all_backends(job, each, gpus, GPUS[name], FABRIC_RATES[fabric]))
    if as_json:
        given = {"model": job.model.name, "per_gpu": each, "gpu": name, "fabric": fabric}
        results = [{"backend": backend, **asdict(found)} for backend, found in rows]
        print_json({**given, "scaling": results})
        return
    for line in by_topic(_lines(job, rows, each, name, fabric), 14):
        click.echo(line)


def _lines(
    job: "Job", rows: "list[tuple[str, Scaling]]", each: int, gpu: str, fabric: str
) -> Iterator[tuple[str, str]]:
    from trainer.report.wording import percent

    def in_columns(*cells: str) -> str:
        return "".join(f"{cell:>15}" for cell in cells)

    yield "model", f"{job.model.name}, {job.model.precision}, {job.optim.loss_text}"
    yield "assumed", f"{many(each, 'sample')} on each {gpu}; {fabric}: {FABRIC_RATES[fabric].source}"
    yield "", f"an estimate from peak rates, not measured ({_PAGE})"
    yield "", in_columns("GPUs", "step, ms", "waits, ms", "loss, ms", "efficiency", "network alone")
    for backend, one in rows:
        times = [f"{seconds * 1e3:.1f}" for seconds in (one.step_s, one.exposed_s, one.loss_s)]
        shares = [percent(one.efficiency), percent(one.communication)]
        yield backend, in_columns(f"{one.gpus:,}", *times, *shares)
    if not rows[-1][1].tiles and LOSSES[job.optim.loss].contrast == "clip":
        yield "hint", f"--set optim.loss_tile={TILE} lets ranks exchange half of what the loss does now"
