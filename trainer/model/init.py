"""Starts a model from weights that do not fit it exactly: another resolution, context length or tower.

Tables of positions are interpolated, those of images by `image_positions.py`. Parameters that the file lacks
begin as they would without it, if they are few enough.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import open_clip.factory as open_clip_factory
import torch
from open_clip.convert import convert_state_dict
from open_clip.model import convert_to_custom_text_state_dict, resize_text_pos_embed
from torch import Tensor, nn

from trainer.checkpoint.weights import cause
from trainer.config import Model
from trainer.errors import InputError
from trainer.model.image_positions import fit_image_positions
from trainer.text.wording import many

TIMM = "timm"
"""Value of `model.init` that takes the weights of timm's image tower alone."""
_NAMED = 5
_TABLES = ("positional_embedding", "pos_embed")


def init_from(model: nn.Module, path: Path, settings: Model) -> list[str]:
    """Loads what fits of the weights file into the model; returns sentences about what does not.

    Raises InputError if more than a share `init_max_missing` of the model's parameters is not in the file.
    """
    most_missing = settings.init_max_missing
    weights = open_clip_factory.load_state_dict(str(path), weights_only=True)
    before = {name: tensor for name, tensor in weights.items() if name.endswith(_TABLES)}
    try:
        fitted = _fitted(model, weights, path, settings.init_keep_positions)
    except (AssertionError, RuntimeError, ValueError) as problem:
        raise InputError(
            f"model.init: {path} does not fit the model ({cause(problem)}): only resolution, caption length "
            "and a few parameters may differ; give weights of a model with the same widths"
        ) from None
    own = model.state_dict()
    loaded = {name: fitted[name] for name in own if name in fitted and fitted[name].shape == own[name].shape}
    missing = [name for name in own if name not in loaded]
    unexpected = [name for name in fitted if name not in loaded]
    share = _numel(own, missing) / _numel(own, own)
    lacks = (
        f"{share:.1%} of the parameters are not in {path}, or have another shape there: {_listed(missing)}"
    )
    if share > most_missing:
        raise InputError(
            f"model.init: {lacks}. At most {most_missing:.1%} may be missing: choose other weights, or set "
            "model.init_max_missing."
        )
    model.load_state_dict(loaded, strict=False)
    notes = [f"init: {lacks}; they begin as without model.init"] if missing else []
    if unexpected:
        notes.append(f"init: {path} has parameters that this model lacks: {_listed(unexpected)}")
    return [
        *(notes or [f"init: all weights of {path} fit"]),
        *_interpolated(before, loaded, settings.init_keep_positions),
    ]


def _interpolated(before: Mapping[str, Tensor], loaded: Mapping[str, Tensor], keep: int) -> Iterator[str]:
    """Yields a sentence for each table of positions that is another one than in the file."""
    for name, tensor in loaded.items():
        there = before.get(name, before.get(name.removeprefix("text.")))
        if there is not None and there is not tensor:
            old, new = there.shape[-2], tensor.shape[-2]
            text = not name.startswith("visual.") and 0 < keep < old < new
            how = (
                f"keeps {many(keep, 'position')}, and the others are stretched" if text else "is interpolated"
            )
            to = f"to {new:,}" if new != old else "to as many for images of another shape"
            yield (
                f"init: {name} {how} from {many(old, 'position')} {to}: no model was trained with those, so "
                "let it train before it is judged"
            )


def stretched(positions_PD: Tensor, length: int, keep: int) -> Tensor:
    """Returns a longer table of positions [length, D]: the first `keep` as they are, the others stretched.

    Each of the others stands for as much of the given table as any other; behind the last place of that, the
    line of its last two goes on. With 20 of 77 and 248 that is Long-CLIP's table (arXiv 2403.15378).
    """
    most = len(positions_PD) - 1
    ratio = (len(positions_PD) - keep) / (length - keep)
    places = keep + ratio * torch.arange(length - keep, dtype=torch.float64)
    left = places.floor().long().clamp(max=most - 1)
    share = (places - left).unsqueeze(1).to(positions_PD.dtype)
    tail = positions_PD[left] + share * (positions_PD[left + 1] - positions_PD[left])
    return torch.cat([positions_PD[:keep], tail])


def _fitted(model: Any, weights: dict[str, Tensor], path: Path, keep: int) -> dict[str, Tensor]:
    """Returns the weights under the model's names, with tables of positions of its sizes."""
    weights = dict(convert_state_dict(model, weights))
    custom = hasattr(model, "text")
    if custom and "positional_embedding" in weights:
        weights = convert_to_custom_text_state_dict(weights)
    if not custom:
        weights = {name.removeprefix("text."): tensor for name, tensor in weights.items()}
    for name in ("logit_scale", "logit_bias"):
        own = getattr(model, name, None)
        if own is not None and name in weights:
            weights[name] = weights[name].reshape(own.shape)
    fit_image_positions(model, weights, path)
    own = getattr(model.text if custom else model, "positional_embedding", None)
    if own is not None:
        name = "text.positional_embedding" if custom else "positional_embedding"
        if name in weights and 0 < keep < len(weights[name]) < len(own):
            weights[name] = stretched(weights[name], len(own), keep)
        resize_text_pos_embed(weights, model)
    return weights


def _numel(weights: Mapping[str, Tensor], names: Iterable[str]) -> int:
    return sum(weights[name].numel() for name in names)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more if names else "none"
