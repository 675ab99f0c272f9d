"""Memory that a training step takes of one GPU, by arithmetic on the model's config; imports no torch.

The sum is what torch's allocator gives out at the step's peak. `make test-nullgpu` compares it with that
allocator; docs/performance.md has the formula. Sizes are in bytes.
"""

from dataclasses import dataclass, fields, replace

from trainer.config import Job
from trainer.config.batch_plan import BatchPlan
from trainer.config.losses import TILE
from trainer.estimate.architecture import Architecture, Tower

_FLOAT = 4
_CHANNELS = 3
_LOADED_CHANNELS = 4
"""Bytes of a pixel as the loader gives it; the fourth is spare."""
_STEPS_LOADED = 2
"""Steps whose images are on the GPU: this one and the next one."""
_WORKSPACES = 140 * 2**20
"""Workspaces of cuBLAS and rounding of small tensors."""
_SAVED_BY_GELU = 2
"""Matrices of a block's hidden width that its backward pass needs: input and result of GELU."""
_LOGITS, _LABELS = 4, 2
_TILES = 4
_TILE_REST = 8 * 2**20
_VALUE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one GPU at the moment of a step that needs most, by what they hold."""

    weights: int
    """Parameters, and what the backward pass needs of them besides: copies in half precision, LoRA's sums."""
    gradients: int
    optimizer: int
    """Values that the optimizer keeps: of AdamW both moments; and the first weights of an anchor."""
    activations: int
    """Values that the forward pass keeps for the backward pass, and that of the block at work."""
    loss: int
    images: int
    """Images of this step and of the next one, as bytes."""
    workspaces: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))


def step_memory(shape: Architecture, job: Job, plan: BatchPlan, shards: int = 1) -> StepMemory:
    """Returns the memory of a rank's step.

    `shards` is the number of ranks among which weights, gradients and optimizer state are divided.
    """
    return max(_moments(shape, job, plan, shards), key=lambda memory: memory.total)


def _moments(shape: Architecture, job: Job, plan: BatchPlan, shards: int) -> list[StepMemory]:
    """Returns the memory at the moments one of which is the peak.

    They are the loss, the begin of each tower's backward pass (the text tower's comes first), and its end;
    where next to nothing is trained, a block at work in the forward pass.
    """
    n, value = plan.micro_batch_size, _VALUE_BYTES[job.model.precision]
    half, wide = value < _FLOAT, max(value, _FLOAT)
    towers = [_with_kernels(tower, job) for tower in shape.trained]
    trained = shape.trained_parameters
    checkpointed = job.model.grad_checkpointing
    height, width = shape.image_size
    pixels = height * width
    state = {
        "optimizer": wide * job.optim.step_values(trained, shape.trained_tables) // shards,
        "images": _STEPS_LOADED * _LOADED_CHANNELS * pixels * plan.batch_size_per_rank,
        "workspaces": _WORKSPACES,
    }
    # Buckets of several ranks, gradients of earlier micro-batches and of CUDA graphs are there all the time.
    always = plan.accumulation > 1 or (plan.world_size > 1 and shards == 1) or job.model.cuda_graphs
    norms = [_FLOAT if tower.wide_stream else _norm_bytes(job) for tower in towers]
    image, text = (
        n * _kept(tower, value, max(value, norm), checkpointed=checkpointed) if tower.parameters else 0
        for tower, norm in zip(towers, norms, strict=True)
    )
    image += n * _CHANNELS * pixels * value if towers[0].embedding else 0
    if job.model.cuda_graphs:  # captions of a size that is not captured have no place in the graphs' memory
        state["workspaces"] += text
    # What FSDP gathers in half precision needs no copies, and is let go after use.
    split = shards > 1
    brief = checkpointed or (split and _gathered_value(job, value) == value)
    cast = half and not brief
    copies = [
        value * (tower.merged * (not checkpointed) + (tower.parameters - tower.embedding) * cast)
        for tower in towers
    ]

    def moment(activations: int, grads: int, casts: int, loss: int = 0, passed: int = 0) -> StepMemory:
        gathered = _gathered(shape, job, value, passed) if split else 0
        return StepMemory(
            weights=wide * (shape.parameters + shape.adapters) // shards + casts + gathered,
            gradients=wide * (trained if always else grads) // shards,
            activations=activations,
            loss=loss,
            **state,
        )

    heads = [
        n * _at_work(tower, value, max(value, norm), checkpointed=checkpointed) if tower.parameters else 0
        for tower, norm in zip(towers, norms, strict=True)
    ]
    return [
        moment(image + text, 0, sum(copies), _loss(shape, job, plan)),
        moment(image + text + heads[1], 0, sum(copies)),
        moment(image + heads[0], towers[1].parameters, copies[0], passed=1),
        moment(n * _CHANNELS * pixels * value, trained, 0, passed=2),
        moment(
            n * (_CHANNELS * pixels * value + max(_passing(tower, value) for tower in shape.towers)), 0, 0
        ),
    ]


def _with_kernels(tower: Tower, job: Job) -> Tower:
    """Returns the tower as the job's kernels compute it: that of QuickGELU keeps as much as GELU."""
    saved = min(tower.saved_activations, _SAVED_BY_GELU)
    return tower if job.model.kernels == "plain" else replace(tower, saved_activations=saved)


def _gathered_value(job: Job, value: int) -> int:
    """Returns the bytes of a parameter as ranks that hold parts of the model gather it."""
    return value if job.comm.fsdp.param_dtype == "auto" else max(value, _FLOAT)


def _gathered(shape: Architecture, job: Job, value: int, passed: int) -> int:
    """Returns the bytes of what ranks that hold parts of the model have whole at a time.

    These are two blocks, one at work and the next one, the gradient of a block and its copy to be reduced,
    and all that belongs to no block. Without `reshard_after_forward` they are the blocks of all towers, but
    of those whose backward pass is over: of `passed` towers, of which the text tower is the first.
    """
    settings, gathered = job.comm.fsdp, _gathered_value(job, value)
    reduced = max(value, _FLOAT) if settings.reduce_dtype == "fp32" or value > _FLOAT else 2
    blocks = [4 * tower.width**2 + 2 * tower.width * tower.hidden for tower in shape.towers]
    stacks = [block * tower.layers for block, tower in zip(blocks, shape.towers, strict=True)]
    whole = 2 * max(blocks)
    if not settings.reshard_after_forward:
        whole = max(whole, sum(stacks[: len(stacks) - passed]))
    rest = shape.parameters - sum(stacks)
    return gathered * (whole + rest) + (gathered + reduced) * max(blocks)


def _norm_bytes(job: Job) -> int:
    """Returns the bytes of a value that layer norms keep of a stream in half precision.

    Autocast gives plain ones a copy in float32.
    """
    return min(_VALUE_BYTES[job.model.precision], _FLOAT) if job.model.kernels == "fast" else _FLOAT


def _block_kept(tower: Tower, value: int, norm: int) -> int:
    """Returns the bytes of one sample that one block keeps for its backward pass.

    Inputs of both layer norms, their results (the inputs of products), queries, keys and values, attention's
    result, the matrices of the MLP; statistics of each layer norm and of each head in float32. `norm` is the
    bytes of a layer norm's input.
    """
    token = tower.width * (2 * norm + 6 * value) + tower.saved_activations * tower.hidden * value
    return tower.tokens * (token + 4 * _FLOAT + tower.heads * _FLOAT)


def _kept(tower: Tower, value: int, norm: int, *, checkpointed: bool) -> int:
    """Returns the bytes of one sample that a tower keeps: of its blocks, and of what is around them.

    With checkpointed activations a block keeps its input alone.
    """
    stream = tower.tokens * tower.width * (norm if tower.wide_stream else value)
    blocks = tower.layers * (stream if checkpointed else _block_kept(tower, value, norm))
    # The last layer norm; the image tower of CLIP has one before the blocks, too, and keeps the result.
    around = tower.tokens * tower.width * (norm if tower.wide_stream else 2 * norm + value)
    return blocks + around


def _passing(tower: Tower, value: int) -> int:
    """Returns the bytes of one sample while it passes a block that keeps nothing.

    These are the hidden values before and after GELU, the stream with what is added to it, and its layer
    norm.
    """
    stream = max(value, _FLOAT) if tower.wide_stream else value
    return tower.tokens * (2 * tower.hidden * value + tower.width * (4 * stream + value))


def _at_work(tower: Tower, value: int, norm: int, *, checkpointed: bool) -> int:
    """Returns the bytes of one sample beyond those kept, while the backward pass is in the last block.

    These are gradients of the stream and of the hidden values; the last layer norm's input is free by then.
    With checkpointed activations the block has been computed again.
    """
    hidden = tower.tokens * value * (tower.width + tower.hidden)
    return hidden + (_block_kept(tower, value, norm) if checkpointed else 0)


def _loss(shape: Architecture, job: Job, plan: BatchPlan) -> int:
    """Returns what the loss takes: tiles of the rank's logits, or all of them where teachers judge rows."""
    n, everybody, width = plan.batch_size_per_rank, plan.global_batch_size, shape.embed_dim
    if job.model.judged_by is not None:
        teachers = len(job.model.targets)
        return plain_loss_bytes(n, everybody, width, labelled=job.optim.labelled, teachers=teachers)
    tile = min(TILE**2, n * everybody)
    return _FLOAT * ((2 * everybody + n) * width + _TILES * tile) + _TILE_REST


def plain_loss_bytes(n: int, N: int, D: int, *, labelled: bool = False, teachers: int = 0) -> int:
    """Returns the bytes that the plain loss adds at its peak, for n samples of N and features of width D.

    It holds four matrices of n x N values (for CLIP the logits and their log-softmax, in both directions; for
    SigLIP logits, signs, their product and its log-sigmoid), and the gathered features of images and texts
    (SigLIP gathers texts alone, and so takes a little less). With labels of pairs (`labelled`) it also holds
    their target, and its product with one of the others. Each teacher takes as much as a loss without any:
    the softmax of its rows and the log-softmax of the model's, in both directions, and its features.
    """
    without = _LOGITS * n * N + 2 * N * D
    return (without * (1 + teachers) + _LABELS * labelled * n * N) * _FLOAT
