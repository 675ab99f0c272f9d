"""Translates flags about the model and the loss."""

from collections.abc import Sequence

from trainer.from_open_clip.line import Line
from trainer.from_open_clip.translation import Flag, Translate, Translation
from trainer.model.catalog import MODELS_OF_4, check_model, known_models, read_config

PRECISIONS = {"amp": "fp16", "amp_bf16": "bf16", "amp_bfloat16": "bf16", "fp32": "tf32"}
"""Values of --precision that a job has, with their names here."""


def model(flag: Flag, line: Line, result: Translation) -> None:
    """Names the model; --force-quick-gelu is the name of a variant."""
    name = line[flag.name]
    audio = any(part in name.lower() for part in ("clap", "genlap"))  # open_clip_train goes by it, too
    if audio or "genlip" in name.lower():
        what = "audio" if audio else "a model that writes captions alone (GenLIP)"
        result.refused[flag.name] = f"not supported: {what}"
        return
    if is_coca(line):
        result.set("optim.loss", "coca")
    if ":" not in name and name.replace("/", "-") not in MODELS_OF_4:
        check_model(name)
    variant = f"{name.replace('/', '-')}-quickgelu"
    if line["--force-quick-gelu"] and variant in known_models():
        result.set("model.name", variant, "--force-quick-gelu is this variant")
    else:
        result.set("model.name", name, named=flag.name in line.named)


def is_coca(line: Line) -> bool:
    """Returns whether open_clip_train takes CoCa's loss: it goes by the model's name."""
    return "coca" in line["--model"].lower()


def teacher(flag: Flag, line: Line, result: Translation) -> None:
    """Names the teacher or its weights; open_clip_train drops a sigmoid loss beside one without a word."""
    if not line.is_distilled:
        return
    if line["--siglip"] or is_coca(line):
        result.refused[flag.name] = (
            "not wanted: open_clip_train learns from a teacher by the rows of a softmax alone, that of clip: "
            "leave the other loss out"
        )
    else:
        result.set(flag.keys[0], line[flag.name])


def quick_gelu(flag: Flag, line: Line, result: Translation) -> None:
    """Checks that the model has a variant with QuickGELU, which `model` names."""
    name = line["--model"].replace("/", "-")
    if line[flag.name] and not name.endswith("-quickgelu") and f"{name}-quickgelu" not in known_models():
        result.refused[flag.name] = (
            f"not supported yet: {name} has no variant with -quickgelu; give model.name a copy of its config "
            "file with quick_gelu = true"
        )


def pretrained(flag: Flag, line: Line, result: Translation) -> None:
    """Names the weights to start from."""
    if line[flag.name]:
        result.set("model.pretrained", line[flag.name])


def precision(flag: Flag, line: Line, result: Translation) -> None:
    """Names the precision of autocast; weights in half precision are refused."""
    given = line[flag.name]
    comment = ""
    if given not in PRECISIONS:
        result.refused[flag.name] = (
            f"not wanted: {given} keeps the weights in half precision, where small updates are lost; "
            "amp_bf16 keeps them in float32"
        )
        comment = f"instead of {given}: weights stay float32"
    elif given == "fp32":
        comment = "open_clip_train lets GPUs multiply in TF32 under this name; fp32 here does not"
    value = PRECISIONS.get(given) or ("fp16" if "fp16" in given else "bf16")
    result.set("model.precision", value, comment, named=flag.name in line.named)


def lock_image(flag: Flag, line: Line, result: Translation) -> None:
    """Locks the image tower with its batch norm."""
    if line[flag.name]:
        note = (
            "" if line["--lock-image-freeze-bn-stats"] else "statistics of batch norm stay as they are, too"
        )
        result.set("model.lock_image", True, note)


def lock_text(flag: Flag, line: Line, result: Translation) -> None:
    """Locks the text tower with its layer norms."""
    if line[flag.name]:
        note = "" if line["--lock-text-freeze-layer-norm"] else "layer norms are locked, too"
        result.set("model.lock_text", True, note)


def with_lock(lock: str) -> Translate:
    """Returns the translation of a number of layers that stay unlocked if the flag `lock` is given."""

    def translate(flag: Flag, line: Line, result: Translation) -> None:
        if line[flag.name] and line[lock]:
            result.set(flag.keys[0], line[flag.name])

    return translate


def channels(given: Sequence[float]) -> list[float]:
    """Returns a value for each of red, green and blue; open_clip takes one for all of them, too."""
    return [*given] * 3 if len(given) == 1 else [*given]


def interpolation(flag: Flag, line: Line, result: Translation) -> None:
    """Gives the interpolation for evaluation; `random` is one of timm's augmentation."""
    if line[flag.name] == "random":
        result.refused[flag.name] = "not supported yet: random interpolation belongs to timm's augmentation"
    elif line[flag.name]:
        result.set("model.image_interpolation", line[flag.name])
        if line.uses_timm and line[flag.name] != "bicubic":
            result.notes.append(
                f"{flag.name} {line[flag.name]} is that of evaluation alone: with use_timm open_clip_train "
                "trains by it, too, and training is bicubic here"
            )


def siglip(flag: Flag, line: Line, result: Translation) -> None:
    """Names the loss, with open_clip_train's limit of the logit scale."""
    if line[flag.name]:
        result.set("optim.loss", "siglip")
        result.set("optim.max_logit_scale", 100.0, "open_clip_train's limit; without this line there is none")


def pretrained_image(flag: Flag, line: Line, result: Translation) -> None:
    """Takes timm's weights if the model's image tower is one of timm's; other towers have none."""
    if line["--pretrained"]:
        return  # there, too, they replace all weights
    if line[flag.name] and "timm_model_name" in read_config(line["--model"]).get("vision_cfg", {}):
        result.set("model.init", "timm")
