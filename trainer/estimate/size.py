"""Number of parameters of a model, from its config alone: for `clipship check`, which imports no torch."""

from dataclasses import dataclass

from trainer.config import Job, Model
from trainer.config.optimizers import OPTIMIZERS
from trainer.estimate.architecture import architecture

_FLOAT32, _FLOAT64 = 4, 8


@dataclass(frozen=True)
class CheckpointBytes:
    """Bytes of a checkpoint's parts."""

    weights: int
    optimizer: int
    ema: int = 0
    """The moving average of the weights; 0 if there is none."""

    @property
    def total(self) -> int:
        """Bytes of the whole checkpoint; a few kilobytes of records are left out."""
        return self.weights + self.optimizer + self.ema


def parameters(model: Model) -> int | None:
    """Returns the number of parameters of open_clip's own transformers and SigLIP's; None for other models.

    It leaves out a few scalars. Other pictures from timm and texts from Hugging Face have no size in their
    config.
    """
    shape = architecture(model)
    return None if shape is None else shape.parameters


def state_bytes(job: Job) -> int | None:
    """Returns the bytes of weights and optimizer state of a model that is trained as a whole, or None."""
    shape = architecture(job.model)
    if shape is None:
        return None
    tables = sum(tower.embedding for tower in shape.towers)
    return _FLOAT32 * (shape.parameters + job.optim.state_values(shape.parameters, tables))


def checkpoint_bytes(job: Job) -> CheckpointBytes | None:
    """Returns the size of a checkpoint; None if the model's config does not say its size.

    What is locked has weights and no optimizer state. LoRA's adapters stand beside the weights.
    """
    shape = architecture(job.model)
    if shape is None:
        return None
    each = _FLOAT64 if job.model.precision == "fp64" else _FLOAT32
    optimizer = OPTIMIZERS[job.optim.optimizer].kept(shape.trained_parameters, shape.trained_tables)
    has_ema = job.optim.ema_decay is not None
    weights = each * (shape.parameters + shape.adapters)
    return CheckpointBytes(weights, each * optimizer, weights * has_ema)
