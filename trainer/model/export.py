"""Writes a trained model in the form that other programs load, with a model card.

`FORMATS` has the forms. Each is a folder that needs nothing else, and each is loaded again with the program
that it was written for, as somebody else would: the functions `by_...`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import open_clip
import open_clip.model
import torch
from open_clip.hf_model import HFTextEncoder
from torch import Tensor, from_numpy, nn

from trainer.checkpoint.weights import cause
from trainer.config import Job
from trainer.errors import InputError
from trainer.model.build import quiet, untrained
from trainer.model.exported import OPEN_CLIP_WEIGHTS, WEIGHTS, Export, write_json_to
from trainer.model.foreign_code import SAFELY
from trainer.model.hub import OPEN_CLIP_CONFIG
from trainer.model.peft_form import weights_of_the_begin, write_adapters
from trainer.model.same_features import Reading, refuse_differences
from trainer.model.text_tower import TextTower, use_our_text_towers
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
    made = Export(job, untrained(job), folder, to)
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


def by_peft(made: Export) -> Reading:
    """`PeftModel`, on transformers' model with the weights of the run's begin."""
    with weights_of_the_begin(made) as folder:
        return by_transformers(replace(made, folder=folder), made.folder)


def by_transformers(made: Export, adapters: Path | None = None) -> Reading:
    """`AutoModel` and `AutoProcessor`."""
    import transformers

    library: Any = transformers  # parts of it have no types
    library.utils.logging.disable_progress_bar()
    model = library.AutoModel.from_pretrained(made.folder, **SAFELY).eval()
    processor = library.AutoProcessor.from_pretrained(made.folder, **SAFELY)
    if adapters is not None:
        import peft

        with warnings.catch_warnings(category=FutureWarning, action="ignore"):  # about transformers' names
            peft.PeftModel.from_pretrained(model, adapters)  # it changes the model's modules
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


FORMATS: dict[str, Form] = {
    "open_clip": Form(_open_clip, by_open_clip, "open_clip", patches=True),
    "hf": Form(
        write_transformers,
        by_transformers,
        "transformers",
        needs=("transformers",),
        compared_with="transformers",
    ),
    "peft": Form(write_adapters, by_peft, "peft", needs=("transformers",), compared_with="peft"),
    "safetensors": Form(_safetensors, by_open_clip_from_weights, "open_clip", patches=True),
    "onnx": Form(
        _onnx, by_onnxruntime, "onnxruntime", needs=("onnx", "onnxscript"), compared_with="onnxruntime"
    ),
}
"""Forms by their names."""
