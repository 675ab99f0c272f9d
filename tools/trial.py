"""Builds a model of open_clip in its full size without memory for it, and trains it for some steps.

On torch's device `meta`, tensors have shapes and no values: each operation of the passes runs as it would,
and fails where it would. Nothing is fetched; text towers of Hugging Face are built from `HUB_TOWERS`. Modules
are not replaced by faster ones, since that compares values.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import open_clip
import torch
from torch import Tensor, nn

from trainer.config import Model
from trainer.model.build import quiet
from trainer.model.captioning import caption_share
from trainer.model.hub import CONFIG
from trainer.model.hub_towers import HUB_TOWERS
from trainer.model.loss import SHARES
from trainer.model.outputs import named
from trainer.model.sample_dropout import draw_by_sample
from trainer.model.text_config import text_config

_BATCH = 2
_META = torch.device("meta")


@dataclass(frozen=True)
class Trial:
    """Result of a trial: the sizes of a model, and the steps that it was trained for."""

    image_parameters: int
    other_parameters: int
    """Those of the text tower, and the scalars of the logits."""
    steps: int
    """Steps that were trained."""


def trial(name: str, steps: int = 2) -> Trial:
    """Trains a model that open_clip knows on the device `meta`. What is raised says why it does not train."""
    settings = Model(name=name)
    with built_on_meta(settings) as model:
        keys = draw_by_sample(model)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=False)
        trained = 0
        for _ in range(steps):
            keys.put(range(_BATCH), _META)
            optimizer.zero_grad()
            _loss(model).backward()
            optimizer.step()
            trained += 1
        whole, image = (sum(p.numel() for p in part.parameters()) for part in (model, _image_tower(model)))
        return Trial(image, whole - image, trained)


@contextmanager
def built_on_meta(settings: Model) -> Iterator[nn.Module]:
    """Yields the model on the device `meta`, in its full size."""
    config = open_clip.get_model_config(settings.name)
    text = text_config(settings, config)
    arguments: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        if tower := text.get("hf_model_name"):
            Path(folder, CONFIG).write_text(json.dumps(HUB_TOWERS[tower]), encoding="utf-8")
            text |= {"hf_model_name": folder, "hf_model_pretrained": False}
            arguments = {"text_cfg": text, "force_custom_text": True}
        with _META, quiet(True):
            model = open_clip.create_model(
                settings.name, device="meta", pretrained_image=False, output_dict=False, **arguments
            )
        if arguments:
            _without_mask(model.text.transformer)
        yield model


def _without_mask(transformer: Any) -> None:
    """Lets the transformer see all tokens: transformers reads the values of a mask."""
    forward = transformer.forward
    transformer.forward = lambda input_ids, attention_mask: forward(input_ids=input_ids)


def _image_tower(model: nn.Module) -> Any:
    return model.visual


def _loss(model: nn.Module) -> Tensor:
    """Returns the loss of made-up pairs: SigLIP's for models with a bias, and that of captions if written."""
    height, width = _pair(_image_tower(model).image_size)
    length = getattr(model, "context_length", None) or 77
    images = torch.zeros(_BATCH, 3, height, width, device=_META)
    tokens = torch.zeros(_BATCH, min(int(length), 77), dtype=torch.int64, device=_META)
    out = named(model(images, tokens))
    share = SHARES["clip" if out.bias is None else "siglip"]
    contrast = share(out.image, out.text, out.scale, out.bias, lambda rows: rows, 0, 0.0, None)
    if out.written is None:
        return contrast
    return contrast + caption_share(out.written, tokens, -1, torch.tensor(tokens.numel(), device=_META))


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size
