"""Writes the adapters of a run of LoRA alone, as peft adds them to a CLIP of transformers.

Attention has three products there for one of open_clip's: all three have its A, and a third of its B each.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from trainer.config import Model
from trainer.config.tables import with_tuples
from trainer.errors import InputError
from trainer.model.build import untrained
from trainer.model.exported import Export
from trainer.model.key_names import Format, Weights, from_open_clip
from trainer.model.layer_numbers import TOWERS
from trainer.model.lora import FACTORS, SCALE, name_beside
from trainer.model.transformers_form import transformers_config, write_transformers
from trainer.run.checkpoints import MANIFEST
from trainer.safe_io.plain import read_json

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def write_adapters(made: Export) -> None:
    """`PeftModel.from_pretrained(model, FOLDER)`, where the model has the weights that the run began with."""
    kind, _ = transformers_config(made)
    tensors = _checkpoint(made)
    adapters = _renamed(tensors, kind)
    _refuse_others(made, bool(adapters))
    made.write_weights(WEIGHTS, adapters)
    rank = next(len(tensor) for name, tensor in tensors.items() if name.endswith(FACTORS[0]))
    scale = next(float(tensor) for name, tensor in tensors.items() if name.endswith(SCALE))
    targets = {name.removeprefix(_PREFIX).partition(".lora_")[0] for name in adapters}
    made.write(
        CONFIG,
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
