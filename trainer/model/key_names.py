"""Names of a CLIP's parameters in open_clip, transformers and Chinese-CLIP: tables that convert both ways.

Sources: `convert_*_clip_original_pytorch_to_hf.py` of transformers, and `cn_clip/clip/model.py` of
Chinese-CLIP (arXiv 2211.01335).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.errors import InputError

Weights = dict[str, Tensor]
Format = Literal["Chinese-CLIP", "transformers ChineseCLIPModel", "transformers CLIPModel"]
FORMATS: tuple[Format, ...] = (
    "Chinese-CLIP",
    "transformers ChineseCLIPModel",
    "transformers CLIPModel",
)
_NAMED = 5


@dataclass(frozen=True)
class Names:
    """A parameter, or all parameters with a beginning, under two names."""

    ours: str
    """Name in open_clip; one that ends with a dot is a beginning."""
    theirs: str
    transposed: bool = False

    def renamed(self, name: str, back: bool = False) -> str | None:
        """Returns the other name of a parameter; None if the row is not about it."""
        source, target = (self.ours, self.theirs) if back else (self.theirs, self.ours)
        if not source.endswith("."):
            return target if name == source else None
        return target + name.removeprefix(source) if name.startswith(source) else None


_VISION = (
    Names("visual.class_embedding", "vision_model.embeddings.class_embedding"),
    Names("visual.conv1.", "vision_model.embeddings.patch_embedding."),
    Names("visual.positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    Names("visual.ln_pre.", "vision_model.pre_layrnorm."),
    Names("visual.ln_post.", "vision_model.post_layernorm."),
    Names("visual.proj", "visual_projection.weight", transposed=True),
    Names("visual.transformer.resblocks.", "vision_model.encoder.layers."),
    Names("logit_scale", "logit_scale"),
)
_CLIP_TEXT = (
    Names("token_embedding.", "text_model.embeddings.token_embedding."),
    Names("positional_embedding", "text_model.embeddings.position_embedding.weight"),
    Names("ln_final.", "text_model.final_layer_norm."),
    Names("text_projection", "text_projection.weight", transposed=True),
    Names("transformer.resblocks.", "text_model.encoder.layers."),
)
_BERT_TEXT = (
    Names("text.proj.weight", "text_projection.weight"),
    Names("text.transformer.", "text_model."),
)
_CHINESE_CLIP = (
    Names("text.proj.weight", "text_projection", transposed=True),
    Names("text.transformer.", "bert."),
    Names("visual.", "visual."),
    Names("logit_scale", "logit_scale"),
)
TABLES: Mapping[Format, tuple[Names, ...]] = {
    "Chinese-CLIP": _CHINESE_CLIP,
    "transformers ChineseCLIPModel": (*_VISION, *_BERT_TEXT),
    "transformers CLIPModel": (*_VISION, *_CLIP_TEXT),
}
_IN_BLOCK = (
    (".ln_1.", ".layer_norm1."),
    (".ln_2.", ".layer_norm2."),
    (".attn.out_proj.", ".self_attn.out_proj."),
    (".mlp.c_fc.", ".mlp.fc1."),
    (".mlp.c_proj.", ".mlp.fc2."),
)
"""Parts of the names within a block; transformers also cuts the joint projection of attention in three."""
_UNUSED = re.compile(r"(bert|text_model)\.pooler\.|.*\.position_ids$")
"""Parameters and buffers that take no part in the features."""
_BLOCKS = (".resblocks.", ".encoder.layers.")


def format_of(names: Iterable[str]) -> Format | None:
    """Returns the format that the names are in; None if it is another one."""
    plain = {name.removeprefix("module.") for name in names}
    if any(name.startswith("bert.embeddings.") for name in plain):
        return "Chinese-CLIP"
    if "text_model.embeddings.word_embeddings.weight" in plain:
        return "transformers ChineseCLIPModel"
    if "text_model.embeddings.token_embedding.weight" in plain:
        return "transformers CLIPModel"
    return None


def to_open_clip(weights: Mapping[str, Tensor], kind: Format) -> Weights:
    """Returns the weights in float32 under open_clip's names. Raises InputError for names that it lacks."""
    whole = _joined({name.removeprefix("module."): tensor for name, tensor in weights.items()})
    kept = {name: tensor for name, tensor in whole.items() if not _UNUSED.match(name)}
    return {name: tensor.to(torch.float32) for name, tensor in _converted(kept, kind, back=False).items()}


def from_open_clip(weights: Mapping[str, Tensor], kind: Format) -> Weights:
    """Returns open_clip's weights under the names of another format. Raises InputError as `to_open_clip`."""
    converted = _converted(weights, kind, back=True)
    if (scale := converted.get("logit_scale")) is not None:
        converted["logit_scale"] = scale.reshape(())  # open_clip's may have a dimension
    return _cut(converted)


def _converted(weights: Mapping[str, Tensor], kind: Format, *, back: bool) -> Weights:
    converted: Weights = {}
    unknown = []
    for name, tensor in weights.items():
        row, other = next(
            ((row, other) for row in TABLES[kind] if (other := row.renamed(name, back)) is not None),
            (None, ""),
        )
        if row is None:
            unknown.append(name)
        else:
            converted[_in_block(other, back)] = tensor.T.contiguous() if row.transposed else tensor
    if unknown:
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        raise InputError(f"{kind} has no parameter called {', '.join(unknown[:_NAMED])}{more}")
    return converted


def _in_block(name: str, back: bool) -> str:
    if not any(part in name for part in _BLOCKS):
        return name
    for ours, theirs in _IN_BLOCK:
        name = name.replace(ours, theirs) if back else name.replace(theirs, ours)
    return name


def _joined(weights: Weights) -> Weights:
    """Returns the weights with one projection of attention in place of three, where there are three."""
    joined: Weights = {}
    for name, tensor in weights.items():
        match = re.fullmatch(r"(.*\.encoder\.layers\.\d+)\.self_attn\.([qkv])_proj\.(weight|bias)", name)
        if match is None:
            joined[name] = tensor
        elif match[2] == "q":
            three = [weights[f"{match[1]}.self_attn.{part}_proj.{match[3]}"] for part in "qkv"]
            joined[f"{match[1]}.attn.in_proj_{match[3]}"] = torch.cat(three)
    return joined


def _cut(weights: Weights) -> Weights:
    """Returns the weights with three projections of attention in place of each joint one."""
    cut: Weights = {}
    for name, tensor in weights.items():
        match = re.fullmatch(r"(.*\.encoder\.layers\.\d+)\.attn\.in_proj_(weight|bias)", name)
        if match is None:
            cut[name] = tensor
            continue
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            cut[f"{match[1]}.self_attn.{part}_proj.{match[2]}"] = rows.contiguous()
    return cut
