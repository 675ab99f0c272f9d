"""Writes a trained model in the form that other programs load, with a model card.

`FORMATS` has the forms. Each is a folder that needs nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.weights import cause
from trainer.config import Job
from trainer.errors import InputError
from trainer.model.build import untrained
from trainer.model.exported import OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS, WEIGHTS, Export
from trainer.model.read_back import (
    by_onnxruntime,
    by_open_clip,
    by_open_clip_from_weights,
    by_transformers,
)
from trainer.model.same_features import Reading, refuse_differences
from trainer.model.transformers_form import write_transformers
from trainer.run.checkpoints import MODEL_CONFIG
from trainer.sysinfo.extras import require
from trainer.sysinfo.memory import is_out_of_memory


@dataclass(frozen=True)
class Form:
    """A form that a model can be exported in."""

    write: Callable[[Export], None]
    read_back: Callable[[Export], Reading]
    """Loads what was written with the program that it is for."""
    program: str
    needs: tuple[str, ...] = ()
    """Modules that writing it needs."""
    patches: bool = False
    """True if it holds a tower that takes pictures in their own shape."""
    compared_with: str = "open_clip"
    """Module that reading it back needs; without it the form is not compared."""


def export(job: Job, folder: Path, to: str) -> tuple[str, ...]:
    """Writes the model of a job, whose `pretrained` are its weights, into an empty folder, and reads it back.

    Returns sentences that its user should know. Raises InputError if the form cannot hold this model, or if
    the program that it is for computes other features.
    """
    form = FORMATS[to]
    for module in form.needs:
        require(module)
    made = Export(job, untrained(job), folder)
    if not (form.patches or made.clip.images.one_size):
        raise InputError(
            f"--to {to}: this form holds towers that take images of one size, and that of {job.model.name} "
            "takes any shape: choose --to open_clip or --to safetensors"
        )
    made.clip.model.eval()
    form.write(made)
    if find_spec(form.compared_with) is None:
        return (f"{form.compared_with} is not installed, so the features of {to} are not compared with ours",)
    return refuse_differences(made.clip, _read_back(form, made, to), to, form.program)


def _read_back(form: Form, made: Export, to: str) -> Reading:
    try:
        return form.read_back(made)
    except Exception as error:  # the other program may raise anything
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"--to {to}: {form.program} cannot load what was written ({cause(error)}): choose another form"
        ) from None


def _open_clip(made: Export) -> None:
    """`open_clip.create_model_and_transforms("local-dir:FOLDER")`."""
    made.write_weights(OPEN_CLIP_WEIGHTS, made.weights)
    preprocess = dict(made.clip.model.visual.preprocess_cfg)  # type: ignore[union-attr, arg-type]
    made.write(OPEN_CLIP_CONFIG, {"model_cfg": made.config, "preprocess_cfg": preprocess})
    _text_files(made)


def _safetensors(made: Export) -> None:
    """Weights by open_clip's names, and the model's config beside them."""
    made.write_weights(WEIGHTS, made.weights)
    made.write(MODEL_CONFIG, made.config)
    _text_files(made)


def _text_files(made: Export) -> None:
    for name, content in made.clip.files.items():
        if name != MODEL_CONFIG:
            (made.folder / name).write_bytes(content)


def _onnx(made: Export) -> None:
    """Two graphs, images to features and tokens to features, of unit length and for any number of samples."""
    towers = {
        "images": (_Tower(made.clip.model, "encode_image"), torch.zeros(2, *made.clip.images.input_shape)),
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


FORMATS: dict[str, Form] = {
    "open_clip": Form(_open_clip, by_open_clip, "open_clip", patches=True),
    "hf": Form(
        write_transformers,
        by_transformers,
        "transformers",
        needs=("transformers",),
        compared_with="transformers",
    ),
    "safetensors": Form(_safetensors, by_open_clip_from_weights, "open_clip", patches=True),
    "onnx": Form(
        _onnx, by_onnxruntime, "onnxruntime", needs=("onnx", "onnxscript"), compared_with="onnxruntime"
    ),
}
"""Forms by their names."""
