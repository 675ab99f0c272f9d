"""Loads an exported model with the program that it was written for, as somebody else would.

Each function returns the model as that program reads it. The other program gets nothing of ours but the
folder.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import open_clip
import open_clip.model
from open_clip.hf_model import HFTextEncoder
from torch import Tensor, from_numpy

from trainer.model.build import quiet
from trainer.model.exported import OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS, WEIGHTS, Export, write_json_to
from trainer.model.foreign_code import SAFELY
from trainer.model.same_features import Reading
from trainer.model.text_tower import TextTower, use_our_text_towers


def by_open_clip(made: Export) -> Reading:
    """`create_model_and_transforms` and `get_tokenizer`."""
    model, transform = _open_clip_model(made, made.folder)
    tokenizer = open_clip.get_tokenizer(f"local-dir:{made.folder}")
    return Reading(model.encode_image, model.encode_text, pixels=transform, tokens=tokenizer)


def by_open_clip_from_weights(made: Export) -> Reading:
    """The weights and the config of a model, put where open_clip looks for them."""
    with TemporaryDirectory() as beside:
        write_json_to(Path(beside, OPEN_CLIP_CONFIG), {"model_cfg": made.config, "preprocess_cfg": {}})
        Path(beside, OPEN_CLIP_WEIGHTS).symlink_to((made.folder / WEIGHTS).absolute())
        model, _ = _open_clip_model(made, Path(beside))
    return Reading(model.encode_image, model.encode_text)


def by_transformers(made: Export) -> Reading:
    """`AutoModel` and `AutoProcessor`."""
    import transformers

    library: Any = transformers  # parts of it have no types
    library.utils.logging.disable_progress_bar()
    model = library.AutoModel.from_pretrained(made.folder, **SAFELY).eval()
    processor = library.AutoProcessor.from_pretrained(made.folder, **SAFELY)
    length = int(made.clip.tokenizer([""]).shape[1])

    def tokens(captions: list[str]) -> Any:
        return processor.tokenizer(
            captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        )

    def pixels(picture: Any) -> Tensor:
        found: Tensor = processor.image_processor(images=picture, return_tensors="pt")["pixel_values"][0]
        return found

    return Reading(
        lambda images: _features(model.get_image_features(pixel_values=images)),
        lambda batch: _features(
            model.get_text_features(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        ),
        pixels=pixels,
        tokens=tokens,
    )


def by_onnxruntime(made: Export) -> Reading:
    """Both graphs, on the CPU."""
    import onnxruntime

    def run(name: str, given: Tensor) -> Tensor:
        session = onnxruntime.InferenceSession(
            made.folder / f"{name}.onnx", providers=["CPUExecutionProvider"]
        )
        return from_numpy(session.run(None, {name: given.numpy()})[0])

    return Reading(lambda images: run("images", images), lambda tokens: run("tokens", tokens))


def _open_clip_model(made: Export, folder: Path) -> tuple[Any, Any]:
    """Returns open_clip's model of a folder, and its transform of a picture."""
    config, own = made.config["text_cfg"], {}
    if isinstance(made.text, TextTower):  # its config lies in the folder, and the hub need not be asked
        own = {"text_cfg": {**config, "hf_model_name": str(made.folder), "hf_model_pretrained": False}}
    with _open_clips_own_text_towers(), quiet(True):
        model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}", **own)
    return model.eval(), transform


@contextmanager
def _open_clips_own_text_towers() -> Iterator[None]:
    open_clip.model.HFTextEncoder = HFTextEncoder
    try:
        yield
    finally:
        use_our_text_towers()


def _features(out: Any) -> Tensor:
    """Returns the features, which newer releases of transformers give among other outputs."""
    found: Tensor = out if isinstance(out, Tensor) else out.pooler_output
    return found
