"""Number of parameters of a model, from its config alone: for `clipship check`, which imports no torch."""

from trainer.model.architecture import architecture

_STATE_BYTES = 12
"""Bytes of a parameter in float32 with AdamW's two moments."""


def parameters(name: str) -> int | None:
    """Returns the number of parameters of open_clip's own transformers and SigLIP's; None for other models.

    It leaves out a few scalars. Other pictures from timm and texts from Hugging Face have no size in their
    config.
    """
    shape = architecture(name)
    return None if shape is None else shape.parameters


def state_bytes(name: str) -> int | None:
    """Returns the bytes of weights and optimizer state of a model that is trained as a whole, or None."""
    count = parameters(name)
    return None if count is None else _STATE_BYTES * count
