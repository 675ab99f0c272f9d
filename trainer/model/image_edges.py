"""Says where an image's edges are no multiples of its patches: what is left over is never seen. No torch."""

from collections.abc import Iterator

from trainer.config import Model
from trainer.model.catalog import read_config
from trainer.text.wording import many


def lost_pixels(model: Model) -> Iterator[str]:
    """Yields a sentence if the model's patches leave out pixels at the right and at the bottom of an image.

    Models whose config does not say their patches are left out.
    """
    vision = read_config(model.name).get("vision_cfg")
    if not isinstance(vision, dict) or isinstance(vision.get("layers"), list) or "timm_model_name" in vision:
        return
    vision = {**vision, **model.tower_changes["vision_cfg"]}
    patch, size = vision.get("patch_size", 16), vision.get("image_size", 224)
    edges = [size] if isinstance(size, int) else list(size)
    if type(patch) is not int or not any(edge % patch for edge in edges):
        return
    lost = " and ".join(many(edge % patch, "pixel") for edge in edges if edge % patch)
    near = " or ".join(" x ".join(str(edge - edge % patch + more) for edge in edges) for more in (0, patch))
    given = " x ".join(map(str, edges))
    yield (
        f"images of {given} (model.image_size) are no multiple of the patches of {patch} pixels, which leave "
        f"{lost} of an edge unseen; {near} loses none"
    )
