"""Fits an image tower's table of positions to images of another size or shape, as open_clip and timm do.

A table does not say its rows and columns. What lies beside the weights does; without that, a table is taken
for a square.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm.layers.helpers import to_2tuple
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor

from trainer.errors import InputError
from trainer.model.catalog import read_config
from trainer.run.checkpoints import MANIFEST, MODEL_CONFIG
from trainer.safe_io.plain import read_json
from trainer.text.wording import many

_DEFAULT_EDGE = 224
"""Edge of the images of a config of open_clip that is silent about it."""


@dataclass(frozen=True)
class _Table:
    """Table of positions of a model's image tower."""

    name: str
    grid: tuple[int, int]
    """Patches of an image below each other, and beside each other."""
    patch: tuple[int, int]
    prefix: int
    """Positions of tokens that are no patches, at the begin."""


def fit_image_positions(model: Any, weights: dict[str, Tensor], path: Path) -> None:
    """Gives the table in `weights`, which are of the file `path`, the grid of the model's image tower.

    Raises InputError if the table is no square and nothing says its grid.
    """
    table = _table_of(model)
    if table is None or (places := weights.get(table.name)) is None:
        return
    old = _grid_there(table, places.shape[-2] - table.prefix, path)
    if old != table.grid:
        batch = places.reshape(1, *places.shape[-2:])
        fitted = resample_abs_pos_embed(batch, list(table.grid), list(old), table.prefix)
        weights[table.name] = fitted.reshape(*places.shape[:-2], *fitted.shape[-2:])


def check_not_reshaped(model: Any, path: Path) -> None:
    """Raises InputError for weights of images that are no squares in a model of images of another shape.

    open_clip, which has loaded them, takes each table of positions for a square.
    """
    edges, own = _edges_beside(path), to_2tuple(model.visual.image_size)
    if edges is not None and edges[0] != edges[1] and edges != own and _table_of(model) is not None:
        raise InputError(
            f"model.pretrained: {path} was trained on images of {list(edges)} (height, width) and the model "
            f"takes {list(own)}: with model.init in place of model.pretrained its positions are fitted"
        )


def _table_of(model: Any) -> _Table | None:
    """Returns the table; None for a tower that has none of one row for each patch."""
    trunk = getattr(model.visual, "trunk", None)
    name = "visual.positional_embedding" if trunk is None else "visual.trunk.pos_embed"
    patches = model.visual if trunk is None else getattr(trunk, "patch_embed", None)
    grid, patch = getattr(patches, "grid_size", None), getattr(patches, "patch_size", None)
    own = model.state_dict().get(name)
    if own is None or grid is None or patch is None:
        return None
    prefix = own.shape[-2] - math.prod(to_2tuple(grid))
    return _Table(name, to_2tuple(grid), to_2tuple(patch), prefix) if prefix >= 0 else None


def _grid_there(table: _Table, positions: int, path: Path) -> tuple[int, int]:
    """Returns the grid of the table in the file. Raises InputError if nothing says it."""
    edges = _edges_beside(path)
    if edges is not None:
        height, width = (edge // patch for edge, patch in zip(edges, table.patch, strict=True))
        if height * width == positions:
            return height, width
    if positions == math.prod(table.grid):
        return table.grid
    edge = math.isqrt(max(0, positions))
    if edge * edge != positions or not edge:
        raise InputError(
            f"model.init: {path} has {many(positions, 'position')} of patches, which are no square, and no "
            f"file beside it says the image_size that they are of: give a checkpoint with its {MANIFEST} and "
            f"{MODEL_CONFIG}, or set model.image_size to the size that the weights were trained at"
        )
    return edge, edge


def _edges_beside(path: Path) -> tuple[int, int] | None:
    """Returns height and width of the images that weights were trained on; None if no file says them."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if size := read_json(path.with_name(MANIFEST), links=True)["job"]["model"].get("image_size"):
            return _pair(size)
    vision = read_config(str(path.with_name(MODEL_CONFIG))).get("vision_cfg")
    return _pair(vision.get("image_size", _DEFAULT_EDGE)) if isinstance(vision, dict) else None


def _pair(size: Any) -> tuple[int, int]:
    height, width = to_2tuple(size)
    return int(height), int(width)
