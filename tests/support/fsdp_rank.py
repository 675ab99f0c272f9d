"""One rank of the backend fsdp: its steps, its checkpoints and its errors, against one process and torch.

`python -m tests.support.fsdp_rank FOLDER DEGREE [steps]`. Everything is in float64, so that only the order of
sums differs, but one step in float32 and one in bf16. With `steps` it leaves out checkpoints and other
models.
"""

import math
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tests.support.jobs import MODELS, nonscalar, tiny_job
from tests.support.rank import joined, tell
from tests.support.steps import fuse_as_on_a_gpu, step_of, weights_of
from tests.support.thread_ranks import run_ranks
from trainer.checkpoint import state
from trainer.checkpoint.identity import RunIdentity
from trainer.checkpoint.resume import restore
from trainer.checkpoint.writer import CheckpointWriter
from trainer.comm.fsdp_backend import FsdpBackend
from trainer.comm.protocol import Comm
from trainer.comm.replicas import ReplicaError, check_replicas
from trainer.comm.torch_backend import TorchBackend, all_gather_single
from trainer.config import Job
from trainer.run.checkpoints import folder_name
from trainer.train.step import MicroBatch, StepResult, TrainStep

CONFIG = str(MODELS / "few-words-vit.json")
"""Its tokens are drawn, and few: nearly all of a tiny model would be embeddings of words."""
SAMPLES, STEPS = 64, 3
BOUND = 1e-12
BOUND_IN_FLOAT32 = 1e-6
"""Share of the whole gradient's norm: each of its values has rounding errors of its own."""


BOUND_IN_BF16 = 2**-8
"""The same in bf16, whose rounding changes a value by at most 2^-9 of itself. With FSDP the gradients of
embeddings and layer norms have bf16 before they are reduced: they are rounded once more than with float32
parameters, and sums over the samples of a micro-batch may be rounded again.
"""


class AsTorch:
    """The same ranks with the reducer of the backend torch."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def reducer(self, model: nn.Module) -> Any:
        return TorchBackend.reducer(cast(TorchBackend, self._comm), model)


def job_of(comm: dict[str, Any], ranks: int, precision: str = "fp64", **model: Any) -> Job:
    """Two micro-batches a rank, and a limit that clips every step."""
    return tiny_job(
        config=CONFIG,
        model={"precision": precision, **model},
        optim={"max_batch_size_per_gpu": 16 // ranks // 2, "grad_clip_norm": 0.01, "warmup_steps": 0},
        comm=comm,
    )


def run_step(train: TrainStep, comm: Any, step: int, *, spoilt: bool = False) -> StepResult:
    """One step on this rank's part of a global batch that depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(16, 3, 32, 32, generator=generator, dtype=torch.float64)
    images = images.to(next(train.model.parameters()).dtype)
    if spoilt:
        images[0] = math.nan
    tokens = torch.randint(1, 1000, (16, 16), generator=generator)
    size = 16 // comm.world.size
    own = slice(comm.world.rank * size, (comm.world.rank + 1) * size)
    micro = train._plan.micro_batch_size
    pairs = zip(images[own].split(micro), tokens[own].split(micro), strict=True)
    return train([MicroBatch(*pair) for pair in pairs], step)


def whole(train: TrainStep) -> dict[str, Tensor]:
    """Weights and optimizer's state, put together; collective."""
    tensors = {name: train.shards.whole(name, tensor) for name, tensor in train.shards.state().items()}
    for name, parameter in train.shards.parameters.items():
        for key, value in train.optimizer.state.get(parameter, {}).items():
            tensors[f"{name} {key}"] = train.shards.whole(name, value) if value.ndim else value
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float = BOUND) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape, name
        wanted = expected[name].double()
        # Adam divides by the root of the second moment: a gradient that is zero but for rounding moves a
        # weight by as much as any other, so weights are compared by what the moments cannot shift.
        error = (tensor.double() - wanted).norm() / max(float(wanted.norm()), 1e-9)
        assert error <= bound, f"{name}: {float(error):.2e}"


def of_one_process(job: Job) -> tuple[dict[str, Tensor], list[float]]:
    def rank_main(comm: Any) -> tuple[dict[str, Tensor], list[float]]:
        train = step_of(job, comm, on_host=True)
        norms = [float(run_step(train, comm, step).grad_norm) for step in range(STEPS)]
        return whole(train), norms

    ((tensors, norms),) = run_ranks(1, rank_main)
    return tensors, norms


def steps_are_those_of_one_process(comm: Comm, job: Job) -> TrainStep:
    """Gradient, clipping, update, and the model that a locked tower leaves."""
    expected, norms = of_one_process(job)
    train = step_of(job, comm, on_host=True)
    for step, norm in enumerate(norms):
        result = run_step(train, comm, step)
        assert abs(float(result.grad_norm) - norm) <= BOUND * norm
        assert norm > 0.01, "every step is clipped"
    assert_close(whole(train), expected)
    return train


def gradient(job: Job, comm: Any, *, rounded: bool = False) -> Tensor:
    """The whole model's gradient of the first step, as one vector; collective.

    `rounded` rounds all parameters but scalars to bf16 before.
    """
    train = step_of(job, comm, on_host=True)
    with torch.no_grad():
        for parameter in train.model.parameters():
            if rounded and parameter.ndim:
                parameter.copy_(parameter.bfloat16())
    run_step(train, comm, 0)
    shards = train.shards
    return torch.cat(
        [
            shards.whole(name, parameter.grad).reshape(-1)
            for name, parameter in shards.parameters.items()
            if parameter.grad is not None
        ]
    )


def gradient_of_one_process(job: Job, *, rounded: bool = False) -> Tensor:
    (expected,) = run_ranks(1, lambda comm: gradient(job, comm, rounded=rounded))
    return expected


def distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, as a share of the norm that is expected."""
    return float((found.double() - expected).norm() / expected.norm())


def a_gradient_in_float32_is_that_of_one_process(comm: Comm, job: Job) -> None:
    found, expected = gradient(job, comm), gradient_of_one_process(job)
    assert found.dtype == torch.float32
    error = distance(found, expected.double())
    print(f"a gradient in float32 differs by {error:.1e} of its norm", flush=True)
    assert error <= BOUND_IN_FLOAT32


PLAIN_LAYER_NORM = functional.layer_norm


def layer_norm_of_a_gpu(*tensors: Any) -> Tensor:
    """Takes all in float32 under autocast, as on a GPU; autocast on CPUs leaves types as they are."""
    if torch.is_autocast_enabled("cpu"):
        tensors = tuple(each.float() if isinstance(each, Tensor) else each for each in tensors)
    return PLAIN_LAYER_NORM(*tensors)


def a_gradient_gathered_in_bf16_is_that_of_one_process_with_rounded_weights(
    comm: Comm, job: Job, exact: Job
) -> None:
    """On CPUs parameters are gathered in float32 otherwise; here they travel as on a GPU."""
    gathered: set[torch.dtype] = set()

    def recorded(output: Tensor, own: Tensor, **keys: Any) -> Any:
        gathered.add(output.dtype)
        return all_gather_single(output, own, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "layer_norm", layer_norm_of_a_gpu)
        patch.setattr(FsdpBackend, "gathers_half", True)
        patch.setattr("trainer.comm.fsdp_backend.all_gather_single", recorded)
        patch.setattr(comm, "_job", job)
        found = gradient(job, comm)
    # A rank that holds the whole model gathers nothing, and torch rounds it all the same.
    assert (torch.bfloat16 in gathered) == (job.comm.fsdp.shard_degree != 1)
    assert found.dtype == torch.float32, "gradients are added up in float32"
    expected, exactly = gradient_of_one_process(job, rounded=True), gradient_of_one_process(exact)
    error = distance(found, expected.double())
    ours, theirs = distance(found, exactly), distance(expected, exactly)
    print(
        f"a gradient gathered in bf16 differs by {error:.1e} of its norm; "
        f"by {ours:.3f} from that in float64, and that of one process by {theirs:.3f}",
        flush=True,
    )
    assert error <= BOUND_IN_BF16
    assert ours <= 1.05 * theirs


def each_rank_holds_its_rows_alone(train: TrainStep, degree: int) -> None:
    held = sum(parameter.numel() for parameter in train.shards.parameters.values())
    everything = sum(parameter.numel() for parameter in train.model.parameters())
    assert held <= everything / degree + 200, (held, everything)
    assert {"logit_scale"} == set(train.shards.parameters) - train.shards.split


def a_step_that_is_not_finite_changes_nothing(train: TrainStep, comm: Comm) -> None:
    before = whole(train)
    assert not run_step(train, comm, STEPS, spoilt=True).finite
    after = whole(train)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def ranks_evaluate_as_often_as_they_like(train: TrainStep, comm: Comm) -> None:
    """Without waiting for each other, and the next step is as if nothing had been."""
    images = torch.zeros(2, 3, 32, 32, dtype=torch.float64)
    train.model.eval()
    with train.shards.gathered(), torch.no_grad():
        for _ in range(1 + comm.world.rank):
            features = train.model.encode_image(images, normalize=True)  # type: ignore[operator]
    train.model.train()
    assert torch.equal(comm.all_gather(features)[:2], features)
    assert all(
        parameter.numel() <= train.shards.whole(name, parameter).numel()
        for name, parameter in train.shards.parameters.items()
    )


def save(folder: Path, train: TrainStep, comm: Comm, step: int, job: Job) -> None:
    settings = tiny_job(checkpoint={"every_rank_writes": True}).checkpoint
    writer = CheckpointWriter(folder, settings, comm.world.rank, comm.world.size, 60.0)
    writer.save(step, train, RunIdentity(job, SAMPLES, order={"block_samples": 8, "lanes": 8}).facts())
    writer.finish()
    comm.barrier(60.0)


def checkpoints_go_from_one_backend_to_another(folder: Path, train: TrainStep, comm: Comm, job: Job) -> None:
    """From fsdp to torch and back; bits and the next step are the same."""
    save(folder / "fsdp", train, comm, STEPS, job)
    held = whole(train)
    other: Any = AsTorch(comm)
    as_torch = step_of(job, other, on_host=True)
    assert not as_torch.shards.split
    assert restore(job, other, folder / "fsdp", as_torch, RunIdentity(job, SAMPLES)).steps_done == STEPS
    assert_close(whole(as_torch), held, 0.0)
    run_step(as_torch, other, STEPS)
    save(folder / "torch", as_torch, other, STEPS + 1, job)
    back = step_of(job, comm, on_host=True)
    assert restore(job, comm, folder / "torch", back, RunIdentity(job, SAMPLES)).steps_done == STEPS + 1
    assert_close(whole(back), whole(as_torch), 0.0)
    run_step(train, comm, STEPS)
    run_step(train, comm, STEPS + 1)
    run_step(back, comm, STEPS + 1)
    assert_close(whole(back), whole(train))
    if comm.world.rank == 0:
        contents = state.load(folder / "fsdp" / folder_name(STEPS), [])
        assert all(tensor.is_contiguous() for tensor in contents.weights.values())


def replicas_are_compared_where_there_are_some(train: TrainStep, comm: Comm, degree: int) -> None:
    check_replicas(comm, train.shards, train.optimizer)
    last, rows = comm.world.size - 1, train.shards.parameters["visual.proj"]
    kept = rows.detach().clone()
    with torch.no_grad():
        if comm.world.rank == last:
            rows[0, 0] += 1.0
    alone = degree == comm.world.size
    with nullcontext() if alone else pytest.raises(ReplicaError, match=f"rank {last}: visual.proj"):
        check_replicas(comm, train.shards, train.optimizer)
    with torch.no_grad():
        rows.copy_(kept)


def main(folder: Path, degree: int, *, steps_alone: bool) -> None:
    settings = {"backend": "fsdp", "fsdp": {"shard_degree": degree}}
    with joined(job_of(settings, 1)) as comm:
        job, half = (job_of(settings, comm.world.size, precision) for precision in ("fp64", "bf16"))
        train = steps_are_those_of_one_process(comm, job)
        each_rank_holds_its_rows_alone(train, degree)
        a_gradient_in_float32_is_that_of_one_process(comm, job_of(settings, comm.world.size, "fp32"))
        a_gradient_gathered_in_bf16_is_that_of_one_process_with_rounded_weights(comm, half, job)
        with pytest.MonkeyPatch.context() as patch:
            fuse_as_on_a_gpu(patch)
            a_gradient_gathered_in_bf16_is_that_of_one_process_with_rounded_weights(comm, half, job)
        replicas_are_compared_where_there_are_some(train, comm, degree)
        if not steps_alone:
            the_rest(folder, train, comm, job)
        tell(["all cases passed", comm.world.rank])


def the_rest(folder: Path, train: TrainStep, comm: Comm, job: Job) -> None:
    """Evaluations, checkpoints and other models."""
    a_step_that_is_not_finite_changes_nothing(train, comm)
    ranks_evaluate_as_often_as_they_like(train, comm)
    checkpoints_go_from_one_backend_to_another(folder, train, comm, job)
    settings = {"backend": "fsdp", "fsdp": {"shard_degree": job.comm.fsdp.shard_degree}}
    begin = folder / "begin.pt"
    if comm.world.rank == 0:
        weights_of(tiny_job(config=CONFIG), begin)
    comm.barrier(60.0)
    lora: dict[str, Any] = {"lora_rank": 3, "pretrained": str(begin)}
    shaped = {"name": nonscalar(CONFIG)}
    cases: list[dict[str, Any]] = [{"lock_image": True}, {"grad_checkpointing": True}, lora, shaped]
    for model in cases:
        train = steps_are_those_of_one_process(comm, job_of(settings, comm.world.size, **model))
        scale = train.model.get_parameter("logit_scale")
        assert not isinstance(scale, DTensor), "a rank that logs it has all of it"
    half, exact = (job_of(settings, comm.world.size, precision, **lora) for precision in ("bf16", "fp64"))
    a_gradient_gathered_in_bf16_is_that_of_one_process_with_rounded_weights(comm, half, exact)
    plain = job_of(settings, comm.world.size)
    anchored = plain.optim.model_copy(update={"anchor": 50.0})
    steps_are_those_of_one_process(comm, plain.model_copy(update={"optim": anchored}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), steps_alone=sys.argv[3:] == ["steps"])
