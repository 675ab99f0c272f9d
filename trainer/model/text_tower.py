"""Text towers of Hugging Face's transformers: open_clip's adapter without what a run cannot use.

open_clip builds them through the name `HFTextEncoder`, which `use_our_text_towers` gives to `TextTower`. The
names of the parameters are open_clip's, so that its weights load here and ours load there. In place of
open_clip's adapter, a tower here reads a folder and never asks a hub, may be of any kind that transformers
can build, locks its groups as the towers of open_clip do, and draws nothing in training that is not drawn by
sample.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import open_clip.model
import torch
from open_clip.hf_configs import arch_dict
from open_clip.hf_model import ClsLastHiddenStatePooler, ClsPooler, HFTextEncoder, MaxPooler, MeanPooler
from torch import nn

from trainer.comm.blocks import repeated_blocks
from trainer.errors import InputError
from trainer.model.foreign_code import SAFELY, check_attention, runs_no_code

_POOLERS = {
    "mean_pooler": MeanPooler,
    "max_pooler": MaxPooler,
    "cls_pooler": ClsPooler,
    "cls_last_hidden_state_pooler": ClsLastHiddenStatePooler,
}
"""open_clip's ways to a text's features, by their names in its configs."""
_RATES = ("dropout", "attention_dropout", "activation_dropout", "layerdrop", "attention_probs_dropout_prob")
"""Attributes, with which transformers' modules call functions that drop values. No layer can be put in their
place that draws by sample."""
_MASK_PADDING = frozenset(
    {"bert", "distilbert", "m2m_100", "modernbert", "mt5", "roberta", "t5", "xlm-roberta"}
)
"""Kinds whose tokens see none of the padding: tests compare features and gradients with those without it."""
_WIDTHS = ("hidden_size", "d_model", "dim")


def use_our_text_towers() -> None:
    """Makes open_clip build its text towers of Hugging Face from `TextTower`."""
    open_clip.model.HFTextEncoder = TextTower


class TextTower(HFTextEncoder):  # type: ignore[misc]  # open_clip has no types
    """Text tower in a folder of transformers' files: tokens, int64 [B, L], to features [B, output_dim]."""

    def __init__(
        self,
        model_name_or_path: str,
        output_dim: int,
        config: Any = None,
        pooler_type: str | None = None,
        proj_type: str | None = None,
        pretrained: bool = True,
        output_tokens: bool = False,
        model_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Builds the tower; its weights are those of the folder if `pretrained`.

        `model_config` has values for the folder's config, which open_clip gives from 4 on. Raises InputError
        for a model that is no text tower.
        """
        from transformers import AutoConfig  # slow to import, and rarely needed

        nn.Module.__init__(self)
        with runs_no_code(model_name_or_path):
            self.config = config or AutoConfig.from_pretrained(model_name_or_path, **SAFELY)
        for key, value in (model_config or {}).items():
            setattr(self.config, key, value)
        check_attention(self.config, model_name_or_path)
        kind = str(self.config.model_type)
        _check_kind(self.config, model_name_or_path)
        known = arch_dict.get(kind, {"pooler": "mean_pooler"})
        pooler_type = pooler_type or str(known["pooler"])
        self.output_tokens, self.output_dim = output_tokens, output_dim
        self.transformer: Any = _transformer(self.config, model_name_or_path if pretrained else None)
        if pooler_type != "cls_pooler" and hasattr(self.transformer, "pooler"):
            setattr(self.transformer, "pooler", None)  # noqa: B010  # no attribute of a Module by its type
        self.vocab_size = int(getattr(self.config, "vocab_size", 0))
        self.context_length = most_tokens(self.config) or 0
        self.pooler = _POOLERS[pooler_type]()
        self.proj = _projection(_width(self.config), output_dim, proj_type)
        self.without_dropout = tuple(_turn_off_functional_dropout(self.transformer))

    @property
    def masked_padding(self) -> int | None:
        """Id of the token that fills captions up, if features and gradients are the same without it."""
        same = str(self.config.model_type) in _MASK_PADDING and type(self.pooler) is not MaxPooler
        return int(self.config.pad_token_id) if same else None

    def lock(self, unlocked_layers: int = 0, freeze_layer_norm: bool = True, *_: Any) -> None:
        """Freezes all but the last groups: the projection, then each block, then the embeddings.

        What is behind the blocks goes with the last of them. Raises NotImplementedError if the tower has no
        blocks.
        """
        blocks = text_blocks(self.transformer)
        if unlocked_layers > 1 and not blocks:
            raise NotImplementedError("its blocks are not known")
        own = list(self.proj.parameters())
        groups = [own, *(list(block.parameters()) for block in reversed(blocks))]
        groups = [group for group in groups if group]
        in_blocks = {id(parameter) for group in groups for parameter in group}
        rest = [(name, p) for name, p in self.transformer.named_parameters() if id(p) not in in_blocks]
        before = [p for name, p in rest if _is_embedding(name)]
        behind = [p for name, p in rest if not _is_embedding(name)]
        groups[bool(own)] = [*behind, *groups[bool(own)]] if blocks else behind
        for parameter in self.parameters():
            parameter.requires_grad = False
        for group in [*groups, before][:unlocked_layers]:
            for parameter in group:
                parameter.requires_grad = True

    def set_grad_checkpointing(self, enable: bool = True, *_: Any, **__: Any) -> None:
        """Makes the blocks compute their activations again in the backward pass."""
        if enable:
            self.transformer.activation_checkpointing_enable({"use_reentrant": False})
        else:
            self.transformer.activation_checkpointing_disable()


def text_notes(model: nn.Module) -> tuple[str, ...]:
    """Returns a sentence about dropout that was turned off in the model's text tower, if there was any."""
    tower = getattr(model, "text", None)
    if not isinstance(tower, TextTower) or not tower.without_dropout:
        return ()
    where = ", ".join(tower.without_dropout)
    reason = "functions draw it, which cannot draw the same values for a sample on every rank"
    return (f"dropout is off in {where} of the text tower: {reason}",)


def check_caption_length(model: nn.Module, length: int) -> None:
    """Raises InputError if the model's text tower has no positions for captions of so many tokens."""
    tower = getattr(model, "text", None)
    if isinstance(tower, TextTower) and 0 < tower.context_length < length:
        raise InputError(
            f"model.context_length = {length} is more than the text tower has positions for: give at most "
            f"{tower.context_length}"
        )


def pools_first_token(tower: TextTower) -> bool:
    """Returns whether a caption's features are those of its first token."""
    return isinstance(tower.pooler, ClsPooler | ClsLastHiddenStatePooler)


def text_blocks(transformer: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a tower, in their order; empty if it repeats none."""
    stacks = [module for module in transformer.modules() if isinstance(module, nn.ModuleList)]
    if not stacks:
        return repeated_blocks(transformer)
    longest = max(stacks, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()))
    return list(longest)


def most_tokens(config: Any) -> int | None:
    """Returns the longest caption that the tower's table of positions has room for; None without a table."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    first = (config.pad_token_id or 0) + 1 if "roberta" in str(config.model_type) else 0
    return positions - first


def _check_kind(config: Any, folder: str) -> None:
    if hasattr(config, "text_config"):
        raise InputError(
            f"model.text: {folder} is a {config.model_type} with more than a text tower: give a model that "
            "reads only text, or an open_clip model by model.name"
        )
    if getattr(config, "pad_token_id", None) is None:
        raise InputError(
            f"model.text: the config.json in {folder} has no pad_token_id, by which a text tower finds the "
            "end of a caption: add the number of its tokenizer's padding token"
        )


def _width(config: Any) -> int:
    return next(int(getattr(config, name)) for name in _WIDTHS if hasattr(config, name))


def _transformer(config: Any, folder: str | None) -> nn.Module:
    """Returns the transformer, an encoder alone, in float32; its weights are random without a folder."""
    import transformers

    library: Any = transformers  # parts of it have no types
    library.utils.logging.disable_progress_bar()
    model: Any
    if folder is None:
        model = library.AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)
    else:  # the config may have other values than the folder's
        model = library.AutoModel.from_pretrained(folder, config=config, dtype=torch.float32, **SAFELY)
    if getattr(config, "is_encoder_decoder", False):
        model = model.get_encoder()
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        raise InputError(
            f"model.text: a {config.model_type} takes no attention mask: give another text tower"
        )
    transformer: nn.Module = model
    return transformer


def _projection(width: int, output_dim: int, kind: str | None) -> nn.Module:
    if kind == "linear":
        return nn.Linear(width, output_dim, bias=False)
    if kind == "mlp":
        middle = (width + output_dim) // 2
        return nn.Sequential(
            nn.Linear(width, middle, bias=False), nn.GELU(), nn.Linear(middle, output_dim, bias=False)
        )
    if width != output_dim:
        raise InputError(
            f"model.text_projection: the text tower is {width} wide and the features are {output_dim}: "
            'set it to "linear" or "mlp"'
        )
    return nn.Identity()


def _turn_off_functional_dropout(transformer: nn.Module) -> Iterator[str]:
    """Sets the rates to 0 that functions draw with; yields the name of each kind of module that had one."""
    seen = set()
    for module in transformer.modules():
        kind = type(module).__name__
        for name in _RATES:
            rate = getattr(module, name, None)
            if isinstance(rate, float) and rate > 0:
                setattr(module, name, 0.0)
                seen.add(f"{kind} ({rate:g})")
            elif isinstance(rate, nn.Dropout) and rate.p > 0 and _hands_over_its_rate(kind):
                seen.add(f"{kind} ({rate.p:g})")
                rate.p = 0.0
    yield from sorted(seen)


def _hands_over_its_rate(kind: str) -> bool:
    """Returns whether modules of this name give the rate of their dropout layer to an attention function."""
    return "Attention" in kind and not any(part in kind for part in ("Output", "Layer"))


def _is_embedding(name: str) -> bool:
    return "embed" in name.lower()
