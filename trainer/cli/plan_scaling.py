"""The command `clipship plan scaling`: what more GPUs bring, by a model of the network. Imports no torch."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import NearChoice, job_argument, set_option
from trainer.config.fabric_rates import FABRIC_RATES
from trainer.config.gpus import GPUS
from trainer.config.loss_tile import TILE
from trainer.config.losses import LOSSES
from trainer.errors import InputError

if TYPE_CHECKING:
    from trainer.config import Job
    from trainer.estimate.scaling import Scaling

_PAGE = "docs/performance.md"
_DEFAULT_GPU = "H100"


@dataclass(frozen=True)
class _Row:
    """Estimate of one backend on one number of GPUs."""

    backend: str
    scaling: "Scaling"


@click.command(
    epilog="""\b
Examples:
  clipship plan scaling job.toml --fabric NDR --gpus 1024
  clipship plan scaling job.toml --per-gpu 256 --gpu A100-80GB --fabric HDR --json"""
)
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
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of the table.")
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
    """
    from trainer.config.loader import load_job

    job = load_job(job_path, overrides)
    each = per_gpu or max(1, job.optim.global_batch_size // job.resources.world_size)
    name = gpu or job.resources.gpu or _DEFAULT_GPU
    rows = list(_rows(job, gpus, each, name, fabric))
    if as_json:
        given = {"model": job.model.name, "per_gpu": each, "gpu": name, "fabric": fabric}
        results = [{"backend": row.backend, **asdict(row.scaling)} for row in rows]
        click.echo(json.dumps({**given, "scaling": results}))
        return
    for topic, text in _lines(job, rows, each, name, fabric):
        click.echo(f"{topic:<14}{text}".rstrip())


def _rows(job: "Job", gpus: int, each: int, gpu: str, fabric: str) -> Iterator[_Row]:
    """Yields the estimates of all backends for one GPU, one node, and eight times as many, up to `gpus`."""
    from trainer.comm.backends import BACKENDS
    from trainer.estimate.architecture import architecture
    from trainer.estimate.scaling import NODE_GPUS, weak_scaling

    shape = architecture(job.model)
    if shape is None:
        raise InputError(
            f"the config of {job.model.name} does not say its size; those of open_clip's own transformers "
            "and of SigLIP do"
        )
    counts = [1]
    while counts[-1] * NODE_GPUS < gpus:
        counts.append(counts[-1] * NODE_GPUS)
    for backend, row in BACKENDS.items():
        for count in [*counts, *([gpus] if gpus > 1 else [])]:
            found = weak_scaling(
                shape, job, each, count, GPUS[gpu], FABRIC_RATES[fabric], backend, row.reduced_mb(job.comm)
            )
            yield _Row(backend, found)


def _lines(job: "Job", rows: list[_Row], each: int, gpu: str, fabric: str) -> Iterator[tuple[str, str]]:
    from trainer.report.wording import percent
    from trainer.text.wording import many

    yield "model", f"{job.model.name}, {job.model.precision}, {job.optim.loss} loss"
    yield "assumed", f"{many(each, 'sample')} on each {gpu}; {fabric}: {FABRIC_RATES[fabric].source}"
    yield "", f"an estimate from peak rates, not measured ({_PAGE})"
    heads = ("GPUs", "step, ms", "waits, ms", "loss, ms", "efficiency", "network alone")
    yield "", "".join(f"{head:>15}" for head in heads)
    for row in rows:
        one = row.scaling
        times = [f"{seconds * 1e3:.1f}" for seconds in (one.step_s, one.exposed_s, one.loss_s)]
        shares = [percent(one.efficiency), percent(one.communication)]
        yield row.backend, "".join(f"{cell:>15}" for cell in (f"{one.gpus:,}", *times, *shares))
    if not rows[-1].scaling.tiles and LOSSES[job.optim.loss].contrast == "clip":
        yield "hint", f"--set optim.loss_tile={TILE} lets ranks exchange half of what the loss does now"
