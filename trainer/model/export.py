"""Writes a trained model in the form that other programs load, with a model card.

`FORMATS` has the forms. Each is a folder that needs nothing else.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.config import Job
from trainer.model.build import untrained
from trainer.model.exported import Export
from trainer.model.transformers_form import WEIGHTS, write_transformers
from trainer.run.checkpoints import MODEL_CONFIG
from trainer.sysinfo.extras import require

OPEN_CLIP_CONFIG = "open_clip_config.json"
OPEN_CLIP_WEIGHTS = "open_clip_model.safetensors"


def export(job: Job, folder: Path, to: str) -> Export:
    """Writes the model of a job, whose `pretrained` are its weights, into an empty folder.

    Raises InputError if the form cannot hold this model.
    """
    made = Export(job, untrained(job), folder)
    made.clip.model.eval()
    FORMATS[to](made)
    return made


def _open_clip(made: Export) -> None:
    """`open_clip.create_model_and_transforms("local-dir:FOLDER")`."""
    save_file(made.weights, made.folder / OPEN_CLIP_WEIGHTS)
    preprocess = dict(made.clip.model.visual.preprocess_cfg)  # type: ignore[union-attr, arg-type]
    made.write(OPEN_CLIP_CONFIG, {"model_cfg": made.config, "preprocess_cfg": preprocess})
    _text_files(made)


def _safetensors(made: Export) -> None:
    """Weights by open_clip's names, and the model's config beside them."""
    save_file(made.weights, made.folder / WEIGHTS)
    made.write(MODEL_CONFIG, made.config)
    _text_files(made)


def _text_files(made: Export) -> None:
    for name, content in made.clip.files.items():
        if name != MODEL_CONFIG:
            (made.folder / name).write_bytes(content)


def _onnx(made: Export) -> None:
    """Two graphs, images to features and tokens to features, of unit length and for any number of samples."""
    for module in ("onnx", "onnxscript"):
        require(module)
    height, width = made.clip.crop.size
    towers = {
        "images": (_Tower(made.clip.model, "encode_image"), torch.zeros(2, 3, height, width)),
        "tokens": (_Tower(made.clip.model, "encode_text"), made.clip.tokenizer(["a", "b"])),
    }
    for name, (tower, example) in towers.items():
        torch.onnx.export(
            tower.eval(),
            (example,),
            made.folder / f"{name}.onnx",
            input_names=[name],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    made.write(MODEL_CONFIG, made.config)
    _text_files(made)


class _Tower(nn.Module):
    """One tower as a model of its own."""

    def __init__(self, model: Any, encode: str) -> None:
        super().__init__()
        self.model, self._encode = model, encode

    def forward(self, samples: Tensor) -> Tensor:
        features: Tensor = getattr(self.model, self._encode)(samples, normalize=True)
        return features


FORMATS: Mapping[str, Callable[[Export], None]] = {
    "open_clip": _open_clip,
    "hf": write_transformers,
    "safetensors": _safetensors,
    "onnx": _onnx,
}
"""Function that writes a form, by the form's name."""
