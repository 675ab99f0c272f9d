"""Writes a trained model in the form that other programs load, with a model card.

`FORMATS` has the forms. Each is a folder that needs nothing else, and each is loaded again with the program
that it was written for, as somebody else would: the functions `by_...`.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import open_clip
import open_clip.model
import torch
from open_clip.hf_model import HFTextEncoder
from PIL import Image
from torch import Tensor, from_numpy, nn

from trainer.checkpoint.weights import cause
from trainer.config import Job, Model
from trainer.config.tables import with_tuples
from trainer.data.tokens import PLAIN_CAPTIONS
from trainer.errors import InputError
from trainer.model.build import Clip, quiet, untrained
from trainer.model.exported import OPEN_CLIP_WEIGHTS, WEIGHTS, Export, write_json_to
from trainer.model.foreign_code import SAFELY
from trainer.model.hub import OPEN_CLIP_CONFIG
from trainer.model.key_names import Format, Weights, from_open_clip
from trainer.model.layer_numbers import TOWERS
from trainer.model.lora import FACTORS, SCALE, name_beside
from trainer.model.text_tower import TextTower, use_our_text_towers
from trainer.model.transformers_form import transformers_config, write_transformers
from trainer.run.checkpoints import MANIFEST, MODEL_CONFIG
from trainer.safe_io.plain import read_json
from trainer.sysinfo.extras import require
from trainer.sysinfo.memory import is_out_of_memory

_ODD = (
    "“A dog’s” day – it’s…",  # noqa: RUF001
    "ﬁne ＡＢＣ！",  # noqa: RUF001
    "图片，一只“猫”。",  # noqa: RUF001
    "Cafe\u0301",
    " two\n\tlines\u00a0",
    "salt &amp; pepper",
    "it's 2,048 x 3.5",
    "a caption that has no end " * 60,
    "",
)
"""Captions that programs clean in other ways: quotes, ligatures, wide letters, accents, white space, HTML."""
_FEATURES = 1e-3
"""Most that features may differ, as a share of their length; float32 differs by some 1e-6."""
_LEVELS = 1.0
"""Most that pixels may differ on average, in levels of 255: interpolations round differently."""
_OWN_TRANSFORM = (
    "the transform that open_clip returns makes images of one size: for any shape, give the model patches "
    "by timm's create_transform(..., naflex=True, patchify=True)"
)
_SMOOTH = 8
_SHIFTS = ((0, 0), *((rows, columns) for rows in (0, 1, -1) for columns in (0, 1, -1) if rows or columns))


@dataclass(frozen=True)
class Reading:
    """An exported model as another program reads it."""

    image: Callable[[Tensor], Tensor]
    """Features of pixels, float32 [n, 3, height, width]."""
    text: Callable[[Any], Tensor]
    """Features of what `tokens` returns, or of our tokens without it."""
    pixels: Callable[[Image.Image], Tensor] | None = None
    """Pixels [3, height, width] of a picture; None if the form says nothing about pictures."""
    tokens: Callable[[list[str]], Any] | None = None
    """Tokens of captions; None if the form has no tokenizer of its own."""


@torch.no_grad()
def differences(clip: Clip, there: Reading) -> list[str]:
    """Returns a clause for each way in which the other program's features are not those of the model."""
    clip.model.eval()
    return [
        *_of_pixels(clip, there),
        *(_of_pictures(clip, there.pixels) if there.pixels and clip.images.one_size else ()),
        *_of_captions(clip, there),
    ]


def refuse_differences(clip: Clip, there: Reading, form: str, program: str) -> tuple[str, ...]:
    """Raises InputError if the other program computes other features; returns what else there is to know."""
    if found := differences(clip, there):
        other = "" if form == "open_clip" else "; --to open_clip takes every model"
        raise InputError(
            f"--to {form}: {program} would make another model of this one: {'; '.join(found)}. Nothing of it "
            f"is kept{other}"
        )
    if not clip.images.one_size:
        return (_OWN_TRANSFORM,)
    shifted = there.pixels and any(shift != (0, 0) for _, shift, _ in _compared(clip, there.pixels))
    note = f"{program} crops some pictures one pixel beside where Clipship and open_clip do: it rounds down"
    return (note,) if shifted else ()


def _of_pixels(clip: Clip, there: Reading) -> Iterator[str]:
    if clip.images.one_size:
        pixels = torch.randn(2, *clip.images.input_shape, generator=torch.Generator().manual_seed(0))
    else:
        pixels = torch.stack([clip.eval_transform(_picture(*size)) for size in ((90, 60), (40, 110))])
    own = clip.model.encode_image(pixels)  # type: ignore[operator]
    share = _distance(own, there.image(clip.images.of_open_clip(pixels)))
    if share > _FEATURES:
        yield f"its features of the same pixels differ by {share:.1%}"


def _of_pictures(clip: Clip, pixels: Callable[[Image.Image], Tensor]) -> Iterator[str]:
    for levels, _, name in _compared(clip, pixels):
        if not levels <= _LEVELS:
            yield f"its pixels of {name} differ by {levels:.1f} levels of 255 on average"
            return


def _compared(
    clip: Clip, pixels: Callable[[Image.Image], Tensor]
) -> Iterator[tuple[float, tuple[int, int], str]]:
    """Yields how far the pixels of a picture are from ours, the shift with which, and the picture's size.

    A shift is one pixel at most, of rows and columns: programs round the middle of a picture in other ways.
    """
    height, width = clip.images.size
    for size in ((2 * width + 1, height + 7), (width - 9, 2 * height + 3), (width + 3, height)):
        ours, theirs = clip.eval_transform(_picture(*size)), pixels(_picture(*size))
        name = f"pictures of {size[0]} x {size[1]}"
        if ours.shape != theirs.shape:
            yield float("inf"), (0, 0), f"{name}, which are {list(theirs.shape)} and not {list(ours.shape)},"
            continue
        std = torch.tensor(clip.std)[:, None, None]
        found = {shift: float((_apart(ours, theirs, *shift) * std).mean() * 255) for shift in _SHIFTS}
        best = min(found, key=lambda shift: (found[shift] > _LEVELS, _SHIFTS.index(shift)))
        yield found[best], best, name


def _apart(ours: Tensor, theirs: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the distance of each pixel but those of the border, one picture being moved."""
    moved = torch.roll(theirs, (rows, columns), dims=(-2, -1))
    return (ours - moved).abs()[..., 1:-1, 1:-1]


def _of_captions(clip: Clip, there: Reading) -> Iterator[str]:
    encode: Any = clip.model.encode_text
    for captions in (PLAIN_CAPTIONS, _ODD) if there.tokens else (PLAIN_CAPTIONS,):
        for caption in captions:
            own = clip.tokenizer([caption])
            theirs = there.tokens([caption]) if there.tokens else own
            share = _distance(encode(own), there.text(theirs))
            if share > _FEATURES:
                yield f"its features of the caption {_short(caption)} differ by {share:.1%}"
                return


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Returns the largest distance of two rows of unit length; infinity if the shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    rows = (torch.nn.functional.normalize(features.float(), dim=-1) for features in (ours, theirs))
    ours, theirs = rows
    distance = float((ours - theirs).norm(dim=-1).max())
    return distance if distance == distance else float("inf")


def _picture(width: int, height: int) -> Image.Image:
    """Returns a smooth random picture."""
    coarse = max(2, height // _SMOOTH), max(2, width // _SMOOTH), 3
    noise = np.random.default_rng(0).integers(0, 256, coarse, dtype=np.uint8)
    return Image.fromarray(noise).resize((max(1, width), max(1, height)), Image.Resampling.BICUBIC)


def _short(caption: str) -> str:
    return repr(caption if len(caption) <= 30 else f"{caption[:30]}...")


ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def write_adapters(made: Export) -> None:
    """`PeftModel.from_pretrained(model, FOLDER)`, where the model has the weights that the run began with.

    Attention has three products there for one of open_clip's: all have its A, and a third of its B each.
    """
    kind, _ = transformers_config(made)
    tensors = _checkpoint(made)
    adapters = _renamed(tensors, kind)
    _refuse_others(made, bool(adapters))
    made.write_weights(ADAPTER_WEIGHTS, adapters)
    rank = next(len(tensor) for name, tensor in tensors.items() if name.endswith(FACTORS[0]))
    scale = next(float(tensor) for name, tensor in tensors.items() if name.endswith(SCALE))
    targets = {name.removeprefix(_PREFIX).partition(".lora_")[0] for name in adapters}
    made.write(
        ADAPTER_CONFIG,
        {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": scale * rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(targets),
            "inference_mode": True,
        },
    )


@contextmanager
def weights_of_the_begin(made: Export) -> Iterator[Path]:
    """Yields a folder with the model as the adapters take it, in the form of transformers."""
    clip = untrained(made.job)
    tensors = _checkpoint(made)
    clip.model.load_state_dict({name: tensors[name] for name in clip.model.state_dict()})
    with TemporaryDirectory() as beside:
        write_transformers(replace(made, clip=clip, folder=Path(beside)))
        yield Path(beside)


_PREFIX = "base_model.model."
"""Beginning of all names of peft's."""


def _checkpoint(made: Export) -> Weights:
    """Returns the tensors of the checkpoint, adapters beside their weights."""
    path = Path(made.job.model.pretrained or "")
    if path.suffix != ".pt":
        return {}
    tensors: Weights = torch.load(path, map_location="cpu", weights_only=True)
    return tensors


def _renamed(tensors: Mapping[str, Tensor], kind: Format) -> Weights:
    """Returns A and B by peft's names."""
    found: Weights = {}
    for factor in FACTORS:
        weights: Weights = {}
        for name, tensor in tensors.items():
            if name.endswith(f".{factor}"):
                weight = name_beside(name.removesuffix(factor), tensors)
                thrice = factor == FACTORS[0] and not weight.endswith(".weight")
                weights[weight] = torch.cat([tensor] * 3) if thrice else tensor
        for name, tensor in from_open_clip(weights, kind).items():
            found[f"{_PREFIX}{name.removesuffix('.weight')}.{factor}.weight"] = tensor
    return found


def _refuse_others(made: Export, any_adapters: bool) -> None:
    """Raises InputError if the checkpoint's run trained other weights than adapters and the logits' scale."""
    if not any_adapters:
        raise InputError("--to peft: these weights have no adapters of LoRA: choose another form")
    manifest = Path(made.job.model.pretrained or "").parent / MANIFEST
    try:
        model = Model.model_validate(with_tuples(read_json(manifest, links=True)["job"]["model"]))
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise InputError(
            f"--to peft: {manifest}, which says what the run trained, cannot be read ({problem}): give a "
            "checkpoint of the run"
        ) from None
    for tower, rank, groups in zip(TOWERS, model.lora, model.unlocked, strict=True):
        if not rank and groups != 0:
            raise InputError(
                f"--to peft: the run trained weights of the {tower} tower, which adapters cannot hold: "
                "choose another form"
            )


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
