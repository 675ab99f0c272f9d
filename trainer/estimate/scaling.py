"""A step on many GPUs, by a model: what its collectives cost, and what of them hides behind work.

Pure; imports no torch. docs/performance.md has the formulas and the assumptions; nothing here was measured on
a network. n: samples of a rank; N: samples of all ranks; D: width of the features.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trainer.comm.backends import BACKENDS, row_of
from trainer.comm.shard_degree import planned_degree
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan
from trainer.config.fabric_rates import FabricRate
from trainer.config.gpus import Gpu
from trainer.config.losses import LOSSES, Contrast, in_tf32
from trainer.estimate.architecture import Architecture
from trainer.estimate.step_speed import step_speed, text_forward_share

Place = Literal["forward", "text", "loss", "backward"]
"""Part of a step: both forward passes, that of the text tower alone, the loss, the backward pass."""
Kind = Literal["all_gather", "all_reduce", "reduce_scatter"]

_LINE_RATE = 0.9
"""Share of a link's rate that a collective reaches."""
_FLOAT = 4
_HALF = 2
_MIB = 2**20
_HALF_PRECISIONS = ("bf16", "fp16")
_LOSS_PRODUCTS: dict[Contrast, int] = {"clip": 6, "siglip": 3}
"""Products of n x N x D in the loss, both passes."""


@dataclass(frozen=True)
class Collective:
    """One kind of collective in a step of one rank."""

    what: Kind
    place: Place
    nbytes: float
    """Bytes that the rank gives to it in a step, over all `times`."""
    times: int
    hidden: bool
    """True if it runs beside the computation of its place; else all ranks wait for it."""
    ranks: int | None = None
    """Ranks that take part; None: all."""
    stride: int = 1
    """Distance from one of them to the next."""


@dataclass(frozen=True)
class Scaling:
    """A step on all GPUs of a plan."""

    step_s: float
    exposed_s: float
    """Seconds of collectives that nothing hides."""
    loss_s: float
    """Seconds of the loss's products, which grow with the global batch."""
    efficiency: float
    """Speed of each GPU, as a share of that of a single one."""


def collectives(
    shape: Architecture, job: Job, plan: BatchPlan, backend: str, bucket_bytes: float
) -> list[Collective]:
    """Returns a rank's collectives in one step, small messages for the log and the consensus left out.

    `bucket_bytes` is what travels in one all-reduce of gradients. `backend` is the name of its row.
    """
    return [*_of_loss(shape, job, plan), *_of_model(shape, backend, bucket_bytes, plan, job)]


def _in_tiles(job: Job) -> bool:
    """Returns whether the loss is computed in tiles. With teachers it is not: they judge whole rows."""
    return job.model.judged_by is None


def _of_loss(shape: Architecture, job: Job, plan: BatchPlan) -> list[Collective]:
    own = plan.batch_size_per_rank * shape.embed_dim * _FLOAT
    everybody = plan.global_batch_size * shape.embed_dim * _FLOAT
    if plan.world_size == 1:
        return []
    if LOSSES[job.optim.loss].contrast == "siglip":
        return [
            Collective("all_gather", "loss", own, 1, hidden=False),
            Collective("reduce_scatter", "loss", everybody, 1, hidden=False),
        ]
    gathers = [
        Collective("all_gather", "text", own, 1, hidden=True)
        if plan.accumulation == 1
        else Collective("all_gather", "loss", own, 1, hidden=False),
        Collective("all_gather", "loss", own, 1, hidden=_in_tiles(job)),
    ]
    if _in_tiles(job):
        normalisers = 2 * plan.batch_size_per_rank * _FLOAT
        return [*gathers, Collective("all_gather", "loss", normalisers, 1, hidden=False)]
    return [*gathers, Collective("reduce_scatter", "loss", 2 * everybody, 2, hidden=False)]


def _of_model(
    shape: Architecture, backend: str, bucket_bytes: float, plan: BatchPlan, job: Job
) -> list[Collective]:
    if plan.world_size == 1:
        return []
    if BACKENDS[backend].splits_model:
        return list(_of_shards(shape, plan, job))
    trained = BACKENDS[backend].gradient_bytes(job.comm) * shape.trained_parameters
    times = max(1, math.ceil(trained / bucket_bytes))
    return [Collective("all_reduce", "backward", trained, times, hidden=True)]


def _of_shards(shape: Architecture, plan: BatchPlan, job: Job) -> Iterator[Collective]:
    """Yields the collectives of ranks of which each group of some consecutive ones holds the model once."""
    degree = planned_degree(job.comm.fsdp.shard_degree, plan.world_size, job.resources.ranks_per_node)
    settings, half = job.comm.fsdp, job.model.precision in _HALF_PRECISIONS
    value = _HALF if half and settings.param_dtype == "auto" else _FLOAT
    trained = BACKENDS["fsdp"].gradient_bytes(job.comm) * shape.trained_parameters * plan.accumulation
    blocks = shape.image.layers + shape.text.layers + 1
    part = value * shape.parameters / degree
    forward = plan.accumulation * (2 if plan.accumulation > 1 else 1)
    again = plan.accumulation * settings.reshard_after_forward
    if degree > 1:
        gathers: tuple[tuple[Place, int], ...] = (("forward", forward), ("backward", again))
        for place, passes in gathers:
            if passes:
                times = passes * blocks
                yield Collective("all_gather", place, passes * part, times, hidden=True, ranks=degree)
        times = plan.accumulation * blocks
        yield Collective("reduce_scatter", "backward", trained, times, hidden=True, ranks=degree)
    if copies := plan.world_size // degree - 1:
        nbytes, times = trained / degree, plan.accumulation * blocks
        among = {"ranks": copies + 1, "stride": degree}
        yield Collective("all_reduce", "backward", nbytes, times, hidden=True, **among)


def seconds_of(collective: Collective, gpus: int, fabric: FabricRate, per_node: int) -> float:
    """Returns the seconds of a collective by itself: the slower of both kinds of links, and its hops.

    `per_node` are the GPUs of a node.
    """
    ranks = collective.ranks or gpus
    inside = max(1, min(ranks, per_node // collective.stride))
    nodes = -(-ranks // inside)
    node_s, gpu_s = (_LINE_RATE * rate * 1e9 for rate in (fabric.node_gb_s, fabric.gpu_gb_s))
    node_s /= min(collective.stride, per_node)  # as many groups share a node's links
    hop_s = fabric.latency_us * 1e-6
    # Bytes of the result of a gather, of the input of the others.
    whole = collective.nbytes * ranks if collective.what == "all_gather" else collective.nbytes
    twice = 2 if collective.what == "all_reduce" else 1
    network = twice * whole * (nodes - 1) / nodes / node_s
    links = twice * whole * (inside - 1) / inside / gpu_s
    # A reduction goes up and down a tree of nodes; gathering goes round a ring of them.
    hops = 2 * math.ceil(math.log2(nodes)) if collective.what == "all_reduce" else nodes - 1
    return max(network, links) + collective.times * (hops + 1) * hop_s


def scaled_step(shape: Architecture, job: Job, plan: BatchPlan, gpu: Gpu, fabric: FabricRate) -> Scaling:
    """Returns the plan's step with the job's backend, on nodes of as many GPUs as the job's."""
    row, per_node = row_of(job), job.resources.ranks_per_node
    work_s = plan.batch_size_per_rank / step_speed(shape, job, plan, gpu).samples_s

    def step(world: int) -> tuple[float, float, float]:
        of_world = replace(plan, world_size=world, global_batch_size=world * plan.batch_size_per_rank)
        loss_s = _loss_flops(shape, job, of_world) / (gpu.tflops[_loss_type(job)] * 1e12)
        found = collectives(shape, job, of_world, row.name, row.reduced_mb(job.comm) * _MIB)
        room: dict[Place, float] = {
            "forward": work_s / 3,
            "text": work_s * text_forward_share(shape, job, plan),
            "loss": loss_s / _LOSS_PRODUCTS["clip"],
            # Ranks that each hold the whole model reduce its gradients beside their last micro-batch alone.
            "backward": work_s * 2 / 3 / (1 if row.splits_model else plan.accumulation),
        }
        asked_s = row.negotiation_s(job, world, -(-world // per_node), fabric.latency_us * 1e-6)
        exposed_s = _exposed_s(found, room, world, fabric, per_node, asked_s)
        return work_s + loss_s + exposed_s, exposed_s, loss_s

    step_s, exposed_s, loss_s = step(plan.world_size)
    return Scaling(step_s, exposed_s, loss_s, step(1)[0] / step_s)


def _loss_type(job: Job) -> str:
    if _in_tiles(job) and in_tf32(job.model.precision, job.model.kernels):
        return "tf32"
    return {"tf32": "tf32", "fp64": "fp64"}.get(job.model.precision, "fp32")


def _loss_flops(shape: Architecture, job: Job, plan: BatchPlan) -> float:
    products = _LOSS_PRODUCTS[LOSSES[job.optim.loss].contrast]
    return 2.0 * products * plan.batch_size_per_rank * plan.global_batch_size * shape.embed_dim


def _exposed_s(
    found: list[Collective],
    room: Mapping[Place, float],
    gpus: int,
    fabric: FabricRate,
    per_node: int,
    negotiation_s: float,
) -> float:
    """Returns the seconds for which all wait.

    `room` are the seconds of computation beside which the hidden ones of a place run. Those of a pass come in
    parts, of which the last one at its end has nothing to run beside. A gather of features begins before what
    it runs beside. `negotiation_s` is how long a backend waits before it begins.
    """

    def seconds(one: Collective) -> float:
        return seconds_of(one, gpus, fabric, per_node)

    exposed = sum(seconds(one) for one in found if not one.hidden)
    for place, room_s in room.items():
        beside = [one for one in found if one.hidden and one.place == place]
        if beside and place in ("forward", "backward"):
            last = max(seconds(replace(one, nbytes=one.nbytes / one.times, times=1)) for one in beside)
            exposed += max(last, sum(map(seconds, beside)) + last - room_s)
        else:
            exposed += max(0.0, sum(map(seconds, beside)) - room_s)
    if gpus == 1:
        return exposed
    # The last bucket of gradients waits for one, and so does each collective of the loss.
    return exposed + negotiation_s * (1 + sum(one.times for one in found if one.place == "loss"))
