"""Says where `model.grad_checkpointing` does nothing: open_clip ignores it in some towers. No torch."""

from collections.abc import Iterator

from trainer.config import Model
from trainer.model.catalog import read_config


def not_recomputed(model: Model) -> Iterator[str]:
    """Yields a sentence if the job asks for checkpointed activations and the image tower is CLIP's ResNet.

    open_clip's ModifiedResNet accepts the setting and does nothing. timm's towers warn by themselves.
    """
    vision = read_config(model.name).get("vision_cfg")
    if not model.grad_checkpointing or not isinstance(vision, dict) or "timm_model_name" in vision:
        return
    if isinstance(vision.get("layers"), list):
        yield (
            f"model.grad_checkpointing does nothing in the image tower of {model.name}, a ResNet of "
            "open_clip's: it saves memory in the text tower alone"
        )
