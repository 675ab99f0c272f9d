"""Estimate of a training step's time on a GPU, from the peaks of its data sheet; imports no torch.

docs/performance.md has the formula, says what it leaves out, and compares it with what an H100 took.
"""

from dataclasses import dataclass

from trainer.config import Job
from trainer.config.batch_plan import BatchPlan
from trainer.config.gpus import Gpu
from trainer.estimate.architecture import Architecture, Tower
from trainer.estimate.drawn_steps import drawn_steps
from trainer.estimate.step_memory import step_memory

_BACKWARD = 2
"""Products of a backward pass for each one of the forward pass."""
_PRODUCTS = 0.7
"""Share of a GPU's peak that matrix products reach; an H100 gave 0.53 to 0.76, by their sizes."""
_TRAFFIC = {"fast": 6.7, "plain": 11.1}
"""Bytes that operators read and write in both passes, for each byte that the forward pass keeps.

Both were measured for ViT-B-32 and ViT-L-14 in bf16 (docs/performance.md), by `model.kernels`.
"""
_SECOND_FORWARD = 0.33
"""Traffic that another forward pass adds, as a share of that of both passes."""
_HOUR_S = 3600.0


@dataclass(frozen=True)
class StepSpeed:
    """Estimate for one GPU."""

    samples_s: float
    """Samples of one GPU in a second."""
    mfu: float
    """Share of the GPU's peak that is spent on the products that training needs, recomputed ones left out."""

    def hours(self, samples: int, gpus: int) -> float:
        """Returns the hours in which that many GPUs pass that many samples."""
        return samples / (self.samples_s * gpus) / _HOUR_S


def training_flops(shape: Architecture, job: Job) -> float:
    """Returns the floating-point operations of matrix products for one sample: forward and backward pass."""
    forward = sum(map(_forward_flops, shape.towers))
    return forward + _BACKWARD * sum(map(_forward_flops, shape.trained))


def step_speed(shape: Architecture, job: Job, plan: BatchPlan, gpu: Gpu) -> StepSpeed:
    """Returns the estimate, for steps of several kinds that of their mean."""
    steps = [
        (share, *_of_sample(drawn, job, parts, gpu)) for share, drawn, parts in drawn_steps(shape, job, plan)
    ]
    seconds, needed = (sum(step[0] * step[at] for step in steps) for at in (1, 2))
    return StepSpeed(1 / seconds, needed / seconds / _peak(job, gpu))


def _of_sample(shape: Architecture, job: Job, plan: BatchPlan, gpu: Gpu) -> tuple[float, float]:
    """Returns the seconds of a sample and the operations that it needs.

    The seconds are those of products at their share of the peak, then of all traffic at its full bandwidth.
    """
    needed = training_flops(shape, job)
    again = (plan.accumulation > 1) + job.model.grad_checkpointing
    flops = needed + again * sum(map(_forward_flops, shape.towers))
    kept = _whole_activations(shape, job, plan)
    traffic = kept * _TRAFFIC[job.model.kernels] * (1 + again * _SECOND_FORWARD)
    seconds = flops / (_PRODUCTS * _peak(job, gpu)) + traffic / (gpu.bandwidth_gb_s * 1e9)
    return seconds, needed


def _peak(job: Job, gpu: Gpu) -> float:
    return gpu.tflops[job.model.precision] * 1e12


def text_forward_share(shape: Architecture, job: Job, plan: BatchPlan) -> float:
    """Returns the share of a step's products that one forward pass of the text tower takes."""
    forward = _forward_flops(shape.text)
    again = (plan.accumulation > 1) + job.model.grad_checkpointing
    return forward / (training_flops(shape, job) + again * (forward + _forward_flops(shape.image)))


def _forward_flops(tower: Tower) -> float:
    """Returns the operations of one sample's forward pass: two for each weight and token, and attention."""
    weights = tower.layers * (4 * tower.width**2 + 2 * tower.width * tower.hidden)
    attention = tower.layers * 2 * tower.tokens * tower.width
    return 2.0 * tower.tokens * (weights + attention)


def _whole_activations(shape: Architecture, job: Job, plan: BatchPlan) -> float:
    """Returns the bytes of one sample that a forward pass keeps if it recomputes nothing."""
    model = job.model.model_copy(update={"grad_checkpointing": False})
    memory = step_memory(shape, job.model_copy(update={"model": model}), plan)
    return memory.activations / plan.micro_batch_size
