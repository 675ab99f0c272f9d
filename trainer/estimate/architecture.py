"""Sizes of a model's two towers, from open_clip's config alone: for `clipship check`, which imports no torch.

Knows the transformers that open_clip defines, and the image towers of SigLIP, which timm defines.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.config import Model
from trainer.model.catalog import config_file
from trainer.model.image_tokens import image_tokens
from trainer.safe_io.plain import read_json

_CHANNELS = 3
_SIGLIP_NAME = re.compile(r"(naflex)?vit_(base|large|so400m|giantopt)_patch(\d+)_siglip(?:_\d+)?")
_SIGLIP = {
    "base": (768, 12, 12, 4.0),
    "large": (1024, 24, 16, 4.0),
    "so400m": (1152, 27, 16, 3.7362),
    "giantopt": (1536, 40, 16, 4.0),
}
"""Width, layers, heads and ratio of the MLP of timm's image towers for SigLIP, by the size in their name."""
_POSITIONS = 16 * 16
"""Positions that timm's towers for pictures of any shape (NaFlex) have a table of, which they interpolate."""
_SPECIAL = ("block_type", "qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn")


@dataclass(frozen=True)
class Tower:
    """A transformer of equal blocks."""

    tokens: int
    """Tokens of one sample that pass through the blocks."""
    width: int
    layers: int
    heads: int
    hidden: int
    """Width inside of a block's MLP."""
    parameters: int
    embedding: int
    """Those of `parameters` that are looked up or added, and take part in no matrix product."""
    wide_stream: bool
    """True if float32 flows between the blocks under autocast, False if its half precision does."""
    saved_activations: int
    """Matrices of a block's hidden width that its backward pass needs: two for GELU, three for QuickGELU."""
    block: int
    """Parameters of one block."""
    head: int
    """Parameters behind the blocks that are a group of their own where a tower is unlocked from its end."""
    norm: int = 0
    """Parameters behind the blocks that are unlocked with the last of them."""
    merged: int = 0
    """Weights that each pass makes from fixed ones and LoRA's adapters; `parameters` are then the latter."""

    def adapted(self, rank: int) -> "Tower":
        """Returns the part that is trained with LoRA on all linear weights of the blocks."""
        return replace(
            self,
            parameters=self.layers * rank * (8 * self.width + 2 * self.hidden),
            embedding=0,
            merged=self.layers * (4 * self.width**2 + 2 * self.width * self.hidden),
        )

    def last(self, groups: int | None) -> "Tower":
        """Returns the part that is trained if only the last `groups` are unlocked; None: all of it.

        The groups are those of open_clip: what is behind the blocks, each block, what is before them.
        """
        blocks = self.layers + 1 if groups is None else groups - bool(self.head)
        if blocks > self.layers:
            return self
        layers, head = max(0, blocks), self.head if groups else 0
        parameters = head + layers * self.block + (self.norm if layers else 0)
        return replace(self, layers=layers, parameters=parameters, embedding=0)


@dataclass(frozen=True)
class Architecture:
    """Two towers and what enters the image tower."""

    image: Tower
    text: Tower
    image_size: tuple[int, int]
    """Height and width of an image in pixels; of its patches below each other where each keeps its shape."""
    embed_dim: int
    """Width of the features that the loss compares."""
    unlocked: tuple[int | None, int | None] = (None, None)
    """Groups of the image tower and of the text tower that are trained, from the end; None: all."""
    lora: tuple[int, int] = (0, 0)
    """Ranks of LoRA in both towers; 0: it has none."""

    @property
    def parameters(self) -> int:
        """Number of parameters; a few scalars are left out."""
        return self.image.parameters + self.text.parameters

    @property
    def towers(self) -> tuple[Tower, Tower]:
        """The image tower and the text tower."""
        return self.image, self.text

    @property
    def trained(self) -> tuple[Tower, Tower]:
        """The parts of both towers that are trained; one without parameters is locked."""
        image, text = (
            tower.adapted(rank) if rank else tower.last(groups)
            for tower, rank, groups in zip(self.towers, self.lora, self.unlocked, strict=True)
        )
        return image, text

    @property
    def adapters(self) -> int:
        """Number of LoRA's parameters, which the model has besides its own."""
        return sum(tower.parameters for tower in self.trained if tower.merged)

    @property
    def trained_parameters(self) -> int:
        """Number of parameters that are trained."""
        return sum(tower.parameters for tower in self.trained)

    @property
    def trained_tables(self) -> int:
        """Number of those that are looked up or added."""
        return sum(tower.embedding for tower in self.trained)


def planned_architecture(model: Model) -> Architecture | None:
    """Returns the sizes of a model of whose step a plan knows all; a teacher's part is not known."""
    return None if model.teacher is not None else architecture(model)


def architecture(model: Model) -> Architecture | None:
    """Returns the sizes of a model; None if its config cannot be read, or does not say them."""
    try:
        config = read_json(config_file(model.name), links=True)
        config = config.get("model_cfg", config)
        if "multimodal_cfg" in config:
            return None
        vision, text = ({**config[part], **own} for part, own in model.tower_changes.items())
        embed_dim = config["embed_dim"]
        quick = bool(config.get("quick_gelu", False))
        if tokens := image_tokens(model, config):
            vision["image_size"] = _of_patches(vision, tokens)
        image = _timm(vision) if "timm_model_name" in vision else _vision(vision, embed_dim, quick=quick)
        if image is None or model.text or "hf_model_name" in text:
            return None
        words = _text(text, embed_dim, quick=quick)
        return Architecture(image, words, _size(vision), embed_dim, model.unlocked, model.lora)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ZeroDivisionError):
        return None


def _of_patches(config: Mapping[str, Any], tokens: int) -> tuple[int, int]:
    """Returns height and width of as many patches below each other; raises TypeError for an unknown tower."""
    match: Any = _SIGLIP_NAME.fullmatch(config["timm_model_name"])
    return tokens * int(match[3]), int(match[3])


def _size(config: Mapping[str, Any]) -> tuple[int, int]:
    size = config.get("image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def _patches(config: Mapping[str, Any], patch: int) -> int:
    height, width = _size(config)
    return (height // patch) * (width // patch)


def _kept(config: Mapping[str, Any], patches: int) -> int:
    """Returns the number of an image's patches that training keeps."""
    return max(1, int(patches * (1 - config.get("patch_dropout", 0.0))))


def _vision(config: Mapping[str, Any], embed_dim: int, *, quick: bool) -> Tower | None:
    """Returns the image tower that open_clip defines; None for a ResNet, or for blocks of other kinds."""
    layers = config.get("layers", 12)
    if not isinstance(layers, int) or config.get("attentional_pool") or any(map(config.get, _SPECIAL)):
        return None
    width, patch = config.get("width", 768), config.get("patch_size", 16)
    tokens = _patches(config, patch) + 1
    hidden = int(width * config.get("mlp_ratio", 4.0))
    norms = 2 * width if config.get("no_ln_pre") else 4 * width
    ends = _CHANNELS * width * patch**2 + width * (tokens + 1) + norms + width * embed_dim
    return Tower(
        _kept(config, tokens - 1) + 1,
        width,
        layers,
        width // config.get("head_width", 64),
        hidden,
        ends + layers * _block(config, width, hidden),
        width * (tokens + 1),
        wide_stream=False,
        saved_activations=3 if quick else 2,
        block=_block(config, width, hidden),
        head=width * embed_dim,
        norm=2 * width,
    )


def _text(config: Mapping[str, Any], embed_dim: int, *, quick: bool) -> Tower:
    width, layers = config.get("width", 512), config.get("layers", 12)
    length = config.get("context_length", 77)
    hidden = int(width * config.get("mlp_ratio", 4.0))
    embedding = width * (config.get("vocab_size", 49408) + length)
    projection = (width + bool(config.get("proj_bias"))) * embed_dim
    if config.get("proj_type") == "none":
        projection = 0
    return Tower(
        length,
        width,
        layers,
        config.get("heads", 8),
        hidden,
        embedding + 2 * width + projection + layers * _block(config, width, hidden),
        embedding,
        wide_stream=True,
        saved_activations=3 if quick else 2,
        block=_block(config, width, hidden),
        head=projection,
        norm=2 * width,
    )


def _timm(config: Mapping[str, Any]) -> Tower | None:
    """Returns an image tower of SigLIP: no class token, pooled by attention; None for others of timm's."""
    match = _SIGLIP_NAME.fullmatch(config["timm_model_name"])
    if match is None or config.get("timm_pool") != "map" or config.get("timm_proj") != "none":
        return None
    if config.get("timm_model_kwargs"):
        return None
    width, layers, heads, ratio = _SIGLIP[match[2]]
    patch, hidden = int(match[3]), int(width * ratio)
    tokens = _patches(config, patch)
    positions = width * (_POSITIONS if match[1] else tokens)
    patches = (_CHANNELS * patch**2 + 1) * width
    pool = width + 4 * width * (width + 1) + 2 * width + 2 * width * hidden + hidden + width
    return Tower(
        _kept(config, tokens),
        width,
        layers,
        heads,
        hidden,
        patches + positions + 2 * width + pool + layers * _block({}, width, hidden),
        positions,
        wide_stream=True,
        saved_activations=2,
        block=_block({}, width, hidden),
        head=2 * width + pool,
    )


def _block(config: Mapping[str, Any], width: int, hidden: int) -> int:
    """Returns the parameters of one block: attention, MLP, two layer norms, and factors of both branches."""
    factors = 2 * width if config.get("ls_init_value") is not None else 0
    return 4 * width * (width + 1) + 2 * width * hidden + hidden + width + 4 * width + factors
