"""Replaces modules of open_clip and timm by faster ones that compute the same.

A replacement changes the class of a module, whose parameters, buffers, names and place stay: checkpoints fit
both. `REPLACEMENTS` lists all of them, and `model.kernels = "plain"` leaves them out.

- Attention is one call of torch's fused attention on views of the joint projection, whose gradients meet in
  one tensor again. `nn.MultiheadAttention` copies them between two layouts, and adds three gradients of which
  each is two thirds zeros. A causal mask is a flag of that call and no matrix.
- Layer norms of half precision read and write it and compute in float32 inside. Under autocast, the plain
  ones make float32 copies of input and output. Gain and bias are rounded, too, as autocast rounds the weights
  of linear layers: this is the one rounding that the plain form does not have.
- A block rounds all its parameters for autocast in one kernel, and so their gradients. Autocast takes one for
  each parameter.
- QuickGELU, x sigmoid(1.702 x), keeps z = 1.702 x alone. Its derivative is that of z sigmoid(z), for which
  torch has a kernel. The plain one keeps x and the sigmoid, and takes five kernels backward.
- The attention that pools a ResNet's features asks for the one query that is used, not for all of them.
- Positions of images of any shape are interpolated on the device, which the host need not ask for their
  grids (`DevicePositions`).
- Text towers take captions that are cut behind the last token that counts (`caption_length.py`), those of
  fused blocks captions laid end to end (`packed_captions.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from open_clip.model import CLIP, CustomTextCLIP
from open_clip.modified_resnet import AttentionPool2d
from open_clip.transformer import (
    LayerNorm,
    LayerNormFp32,
    QuickGELU,
    ResidualAttentionBlock,
    TextTransformer,
    Transformer,
)
from timm.layers import Attention as TimmAttention  # type: ignore[attr-defined]
from timm.layers import Mlp as TimmMlp  # type: ignore[attr-defined]
from timm.layers.drop import DropPath
from timm.models.naflexvit import NaFlexEmbeds
from timm.models.vision_transformer import Block as TimmBlock
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trainer.config import Model
from trainer.model.caption_length import CaptionLength, pooled_place
from trainer.model.fused_block import (
    QUICK,
    BlockOps,
    BlockParts,
    BlockShape,
    Unsummed,
    attended,
    block_ops,
    fused_forward,
    heads_of,
    kind_of_gelu,
)
from trainer.model.open_clip_api import is_plain_attention, modern_padding
from trainer.model.packed_captions import Packed
from trainer.model.rounding import rounded
from trainer.model.text_tower import TextTower
from trainer.text.wording import many


def is_half(x: Tensor) -> bool:
    """Returns whether the stream has half precision, under autocast."""
    return x.dtype in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(x.device.type)


class FastLayerNorm(LayerNorm):  # type: ignore[misc]
    """Layer norm of open_clip, which casts its output."""

    def forward(self, x: Tensor) -> Any:
        if not is_half(x):
            return super().forward(x)
        return in_its_type(self, x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class FastLayerNormFp32(LayerNormFp32):  # type: ignore[misc]
    """Layer norm of open_clip that casts its input, too."""

    def forward(self, x: Tensor) -> Any:
        if not is_half(x):
            return super().forward(x)
        return in_its_type(self, x, self.weight.to(x.dtype), self.bias.to(x.dtype))


FAST_NORMS = (FastLayerNorm, FastLayerNormFp32)
"""Norms that take and give half precision."""


def normalised(norm: nn.Module, rounded: Any, x: Tensor) -> Any:
    """Returns the norm of x, by gain and bias that are rounded already, or by its own for None."""
    return norm(x) if rounded is None else in_its_type(norm, x, *rounded)


def in_its_type(norm: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns the norm of x in its own type, in which gain and bias are given."""
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def _in_turn(blocks: Iterable[nn.Module], x: Any, **others: Any) -> Any:
    """Passes x through fused blocks, each of which adds what the one before leaves to its first norm."""
    *before, last = blocks
    for block in before:
        x = block(x, sums=False, **others)
    return last(x, **others)


class FastTransformer(Transformer):  # type: ignore[misc]
    """Blocks of open_clip's own transformers."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Any:
        # With checkpointed activations each block's input is kept: one tensor is less than two.
        whole = self.grad_checkpointing or not getattr(self, "batch_first", True)
        if whole or not all(isinstance(b, FastBlock) and b.is_fused(x, attn_mask) for b in self.resblocks):
            return super().forward(x, attn_mask)
        return _in_turn(self.resblocks, x, attn_mask=attn_mask)


class FastBlock(ResidualAttentionBlock):  # type: ignore[misc]  # open_clip has no types
    """Block of open_clip's own transformers; inputs are [B, T, width].

    If captions are packed the mask is where each begins, int64 [captions + 1], and B is 1.
    """

    causal = False
    """True if each token sees itself and those before it alone."""
    fused_ops: BlockOps | None = None
    """Functions that compute the block; None: torch's own."""

    def forward(
        self,
        q_x: Tensor,
        k_x: Tensor | None = None,
        v_x: Tensor | None = None,
        attn_mask: Tensor | None = None,
        *,
        sums: bool = True,
    ) -> Any:
        if k_x is not None or v_x is not None or not _rounds(q_x):
            return super().forward(q_x, k_x, v_x, attn_mask)
        if self.fused_ops is not None and self.is_fused(q_x, attn_mask):
            starts = attn_mask if attn_mask is not None and attn_mask.dim() == 1 else None
            causal = attn_mask is not None
            return fused_forward(self.fused_ops, q_x, self.parts(), causal, starts, sums=sums)
        return self._rounded_forward(q_x, attn_mask)

    def is_fused(self, x: Tensor | Unsummed, mask: Tensor | None) -> bool:
        """Returns whether the block computes this by fused functions."""
        takes_mask = mask is None or (self.causal and mask.dim() <= 2)
        return self.fused_ops is not None and takes_mask and _rounds(x)

    def _rounded_forward(self, x: Tensor, mask: Tensor | None) -> Any:
        """Computes what autocast would, from parameters that are rounded together."""
        attn, mlp = self.attn, self.mlp
        linear = [attn.in_proj_weight, attn.in_proj_bias, attn.out_proj.weight, attn.out_proj.bias]
        linear += [mlp.c_fc.weight, mlp.c_fc.bias, mlp.c_proj.weight, mlp.c_proj.bias]
        norms = (self.ln_1, self.ln_2) if isinstance(self.ln_1, FAST_NORMS) and is_half(x) else ()
        parameters = [*linear, *(parameter for norm in norms for parameter in (norm.weight, norm.bias))]
        short = rounded(torch.get_autocast_dtype(x.device.type), parameters)
        of_norm = [short[8:10], short[10:12]] if norms else [None, None]
        joint = F.linear(normalised(self.ln_1, of_norm[0], x), short[0], short[1])
        attended = self._attended(joint, mask)
        x = x + self.ls_1(F.linear(attended, short[2], short[3]))
        hidden = mlp.gelu(F.linear(normalised(self.ln_2, of_norm[1], x), short[4], short[5]))
        return x + self.ls_2(F.linear(hidden, short[6], short[7]))

    def _attended(self, joint_BTE: Tensor, mask: Tensor | None) -> Tensor:
        heads = self.attn.num_heads
        if mask is None or (self.causal and mask.dim() == 2):
            return attended(joint_BTE, heads, causal=mask is not None)
        if mask.dim() != 2:
            mask = mask.view(len(joint_BTE), heads, *mask.shape[1:])
        return attended(joint_BTE, heads, mask=mask.to(joint_BTE.dtype))

    def parts(self) -> BlockParts:
        attn, mlp = self.attn, self.mlp
        return BlockParts(
            self.ln_1,
            (attn.in_proj_weight, attn.in_proj_bias),
            attn.num_heads,
            (attn.out_proj.weight, attn.out_proj.bias),
            self.ls_1,
            self.ln_2,
            (mlp.c_fc.weight, mlp.c_fc.bias),
            kind_of_gelu(mlp.gelu),
            (mlp.c_proj.weight, mlp.c_proj.bias),
            self.ls_2,
        )

    def attention(
        self,
        q_x: Tensor,
        k_x: Tensor | None = None,
        v_x: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Any:
        if k_x is not None or v_x is not None:
            return super().attention(q_x, k_x, v_x, attn_mask)
        attn = self.attn
        joint_BTE = F.linear(q_x, attn.in_proj_weight, attn.in_proj_bias)
        return attn.out_proj(self._attended(joint_BTE, attn_mask))


class FastTimmAttention(TimmAttention):
    """Attention of timm's vision transformers without a gate; the input is [B, T, width]."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = heads_of(self.qkv(x), self.num_heads)
        dropped = self.attn_drop.p if self.training else 0.0
        out = F.scaled_dot_product_attention(
            self.q_norm(q), self.k_norm(k), v, attn_mask=attn_mask, dropout_p=dropped, is_causal=is_causal
        )
        seen: Tensor = self.proj_drop(self.proj(self.norm(out.transpose(1, 2).flatten(2))))
        return seen


class FastTimmBlock(TimmBlock):
    """Block of timm's vision transformers; inputs are [B, T, width]."""

    fused_ops: BlockOps | None = None
    """Functions that compute the block; None: torch's own."""

    def forward(
        self,
        x: Tensor | Unsummed,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        sums: bool = True,
    ) -> Any:
        if self.fused_ops is None or attn_mask is not None or is_causal or not _rounds(x):
            return super().forward(x, attn_mask, is_causal)  # type: ignore[arg-type]
        return fused_forward(self.fused_ops, x, self.parts(), causal=False, sums=sums)

    def is_fused(self, x: Tensor) -> bool:
        """Returns whether the block computes this by fused functions."""
        return self.fused_ops is not None and _rounds(x)

    def parts(self) -> BlockParts:
        attn: Any = self.attn
        mlp: Any = self.mlp
        return BlockParts(
            self.norm1,
            (attn.qkv.weight, attn.qkv.bias),
            attn.num_heads,
            (attn.proj.weight, attn.proj.bias),
            self.ls1,
            self.norm2,
            (mlp.fc1.weight, mlp.fc1.bias),
            kind_of_gelu(mlp.act),
            (mlp.fc2.weight, mlp.fc2.bias),
            self.ls2,
        )


class FastTimmBlocks(nn.Sequential):
    """Blocks of timm's vision transformers, where activations are not checkpointed."""

    def forward(self, x: Tensor) -> Any:
        if not all(isinstance(block, FastTimmBlock) and block.is_fused(x) for block in self):
            return super().forward(x)  # type: ignore[no-untyped-call]
        return _in_turn(self, x)


def _rounds(x: Tensor | Unsummed) -> bool:
    """Returns whether autocast would round parameters now. A compiler does that by itself."""
    return torch.is_autocast_enabled(x.device.type) and not torch.compiler.is_compiling()


class DevicePositions(NaFlexEmbeds):
    """Embedding of patches that waits for no device; positions are in the precision of the table.

    timm interpolates the table once for each grid of a batch, for which the host asks the device twice for
    every image, and waits. Here a patch's position is the table times weights of rows and columns, the same
    ones with which torch's interpolation with antialias sums up the table.
    """

    def _apply_learned_naflex_pos_embed(self, x: Tensor, patch_coord: Tensor) -> None:
        """Adds the positions to `x`, [B, T, width], in place."""
        table = self.pos_embed
        assert table is not None
        table_HWD = table[0]
        grid_B2, weigh = patch_coord.amax(1) + 1, _FILTERS[self.pos_embed_interp_mode]
        rows_BTH, columns_BTW = (
            _weights(patch_coord[..., axis], grid_B2[:, axis, None], length, weigh, table.dtype)
            for axis, length in enumerate(table_HWD.shape[:2])
        )
        of_cells_BTC = (rows_BTH[..., None] * columns_BTW[..., None, :]).flatten(2)
        with torch.autocast(x.device.type, enabled=False):
            positions_BTD = of_cells_BTC @ table_HWD.flatten(0, 1)
        x += positions_BTD.to(x.dtype)


def can_be_weighed(embeds: NaFlexEmbeds) -> bool:
    """Returns whether the positions are such a sum: a table that is interpolated with antialias."""
    others = ("ar_preserving", "align_corners", "use_grid_sample")
    return (
        embeds.pos_embed_type == "learned"
        and embeds.pos_embed_interp_mode in _FILTERS
        # Before they were settings, timm had antialias and no aligned corners.
        and getattr(embeds, "pos_embed_antialias", True)
        and not any(getattr(embeds, f"pos_embed_{name}", False) for name in others)
    )


def _weights(
    at_BT: Tensor, size_B1: Tensor, length: int, weigh: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Tensor:
    """Returns the weights of `length` places of a table at places of an axis of `size`, [B, T, length]."""
    scale_B1 = length / size_B1.to(dtype)
    centre_BT1 = (scale_B1 * (at_BT + 0.5))[..., None]
    places_L = torch.arange(length, device=at_BT.device, dtype=dtype) + 0.5
    weights_BTL = weigh((places_L - centre_BT1) / scale_B1.clamp(min=1)[..., None])
    return weights_BTL / weights_BTL.sum(-1, keepdim=True)


def _triangle(distance: Tensor) -> Tensor:
    return (1 - distance.abs()).clamp(min=0)


def _cubic(distance: Tensor) -> Tensor:
    """Cubic convolution with a = -0.5 (Keys, 1981), as Pillow and torch's antialias have it."""
    x = distance.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


_FILTERS: Mapping[str, Callable[[Tensor], Tensor]] = {"bilinear": _triangle, "bicubic": _cubic}


_POOLED = ("argmax", "eos")
_HALF = ("bf16", "fp16")
_RANDOM = (nn.Dropout, DropPath)
_COLOURS = 3
_PATCH = 8
"""Least side of patches that are cut for a product; a smaller kernel is the stem of a convolutional tower."""


@dataclass(frozen=True)
class Kernels:
    """Modules that were replaced, for the log."""

    replaced: Counter[str] = field(default_factory=Counter)
    """Number of modules by what is done to them."""
    caption_length: CaptionLength | None = None
    """Finds the length to which captions are cut for training; None: they stay as they are."""
    longest: int = 0
    """Most tokens whose attention fused blocks compute by kernels of ours; torch's compute it beyond."""
    problem: str = ""
    """Reason, in words, why blocks are not fused on this GPU; empty if they are."""

    def __str__(self) -> str:
        parts = [many(count, name) for name, count in self.replaced.items()]
        if self.replaced["fused block"]:
            parts.append(f"attention in Triton up to {self.longest} tokens")
        if self.caption_length is not None:
            packs = self.caption_length.packs
            parts.append("packed captions" if packs else "captions cut behind the longest of a micro-batch")
        if self.problem:
            parts.append(f"blocks not fused ({self.problem})")
        return "fast: " + ", ".join(parts) if parts else "plain"


def use_kernels(model: nn.Module, settings: Model) -> Kernels:
    """Replaces the model's modules, on the device where it will be trained, as the job asks.

    Returns what was replaced.
    """
    if settings.kernels == "plain":
        return Kernels()
    replaced: Counter[str] = Counter()
    text = _text_tower(model)
    for module in model.modules():
        row = REPLACEMENTS.get(type(module))
        if row is not None and row.fits(module, settings):
            module.__class__ = row.kind  # the instance keeps its settings, hooks and names
            if row.name:
                replaced[row.name] += 1
    causal = text is not None and _is_causal(text.attn_mask)
    if causal:
        for block in text.transformer.resblocks:
            block.causal = True
    blocks = _fusable_blocks(model) if settings.precision in _HALF else {}
    ops, problem = None, ""
    if blocks:
        ops, problem = block_ops(settings, next(model.parameters()).device, frozenset(blocks.values()))
    if ops is not None:
        replaced["fused block"] = len(blocks)
        for block in blocks:
            block.fused_ops = ops
    captions = _caption_length(text, settings) if causal else _padding_cut(model, settings)
    return Kernels(replaced, captions, ops.longest if ops is not None else 0, problem)


def _fusable_blocks(model: nn.Module) -> dict[FastBlock | FastTimmBlock, BlockShape]:
    """Returns the shapes of blocks that can be fused; the table of positions around one tells its tokens."""
    found = {}
    for tower in model.modules():  # outer ones first: CLIP has captions' positions, and the images' tower
        tables = (getattr(tower, name, None) for name in ("positional_embedding", "pos_embed"))
        tokens = next((table.shape[-2] for table in tables if isinstance(table, Tensor)), None)
        for block in tower.modules():
            if not isinstance(block, FastBlock | FastTimmBlock) or (tokens is None and block in found):
                continue
            parts, causal = block.parts(), isinstance(block, FastBlock) and block.causal
            if parts.can_be_fused():
                found[block] = BlockShape(tokens or 1, parts.joint[0].shape[1], parts.heads, causal)
    return found


class _QuickGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scaled = QUICK * x
        ctx.save_for_backward(scaled)
        return scaled.sigmoid().mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (scaled,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0], scaled)  # type: ignore[no-any-return]


class _QuickGELU(QuickGELU):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Any:
        return _QuickGelu.apply(x)


class PatchProduct(nn.Conv2d):
    """Patch embedding as one matrix product. cuDNN's convolutions take up to ten times as long for it."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = self.kernel_size
        rows, columns = x.shape[2] // height, x.shape[3] // width
        x = x[:, :, : rows * height, : columns * width]  # what a convolution leaves out
        x = x.reshape(len(x), x.shape[1], rows, height, columns, width)
        patches_BTF = x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        out_BDT: Tensor = F.linear(patches_BTF, self.weight.flatten(1), self.bias).transpose(1, 2)
        return out_BDT.view(*out_BDT.shape[:2], rows, columns)


class _AttentionPool(AttentionPool2d):  # type: ignore[misc]
    """Pools [B, C, H, W] by attention of their mean, the first token, to all of them and itself."""

    def forward(self, x: Tensor) -> Tensor:
        x_TBC = x.flatten(2).permute(2, 0, 1)
        x_TBC = torch.cat([x_TBC.mean(dim=0, keepdim=True), x_TBC])
        x_TBC = x_TBC + self.positional_embedding[:, None].to(x.dtype)
        pooled_1BC, _ = F.multi_head_attention_forward(
            query=x_TBC[:1],
            key=x_TBC,
            value=x_TBC,
            embed_dim_to_check=x_TBC.shape[-1],
            num_heads=self.num_heads,
            in_proj_weight=None,
            in_proj_bias=torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]),
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=self.c_proj.weight,
            out_proj_bias=self.c_proj.bias,
            training=self.training,
            need_weights=False,
            use_separate_proj_weight=True,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
        )
        return pooled_1BC[0]


class _Clip(CLIP):  # type: ignore[misc]
    """Takes captions of any length up to the context length, and packed ones."""

    def _pooled(self, text: Tensor) -> Any:
        length = text.shape[1]
        dtype = self.transformer.get_cast_dtype()
        x_BTD = self.token_embedding(text).to(dtype) + self.positional_embedding[:length].to(dtype)
        x_BTD = self.transformer(x_BTD, attn_mask=self.attn_mask[:length, :length])
        places_B = pooled_place(text, self.text_eos_id if self.text_pool_type == "eos" else None)
        places_B1D = places_B[:, None, None].expand(-1, 1, x_BTD.shape[2])
        return x_BTD.gather(1, places_B1D)[:, 0]  # its gradient takes no sort, as that of an index does

    def _pooled_of_packed(self, captions: Packed) -> Tensor:
        dtype = self.transformer.get_cast_dtype()
        places_ND = F.embedding(captions.positions, self.positional_embedding)
        x_ND = self.token_embedding(captions.ids).to(dtype) + places_ND.to(dtype)
        x_1ND: Tensor = self.transformer(x_ND[None], attn_mask=captions.starts)
        return x_1ND[0].index_select(0, captions.ends)

    def _encode_text(self, text: Tensor | Packed, normalize: bool = False) -> Tensor:
        # The norm is of each token by itself: that of the pooled one is enough.
        pooled_BD = self._pooled_of_packed(text) if isinstance(text, Packed) else self._pooled(text)
        x = self.ln_final(pooled_BD)
        if isinstance(self.text_projection, nn.Linear):
            x = self.text_projection(x)
        elif self.text_projection is not None:
            x = x @ self.text_projection
        return F.normalize(x, dim=-1) if normalize else x

    encode_text = _encode_text  # before open_clip 4 the forward pass calls this one


class _TextTower(TextTransformer):  # type: ignore[misc]
    """Takes captions of any length up to the context length."""

    def _embeds(self, text: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD, mask = super()._embeds(text)
        length = x_BTD.shape[1]
        return x_BTD, mask[..., :length, :length]


@dataclass(frozen=True)
class Replacement:
    """One row of the table."""

    kind: type[nn.Module]
    fits: Callable[[Any, Model], bool]
    """Function from a module and the job's settings to whether it may be replaced."""
    name: str = ""
    """The log's name of what is replaced; empty: not named."""


def _usual_block(block: Any, _: Model) -> bool:
    attn, mlp = block.attn, block.mlp
    return (
        [name for name, _ in mlp.named_children()] == ["c_fc", "gelu", "c_proj"]
        and type(mlp.c_fc) is nn.Linear
        and type(mlp.c_proj) is nn.Linear
        and is_plain_attention(attn)
    )


def _of_timm_blocks(blocks: Any, _: Model) -> bool:
    return len(blocks) > 0 and all(type(block) is TimmBlock for block in blocks)


def _has_gain(norm: Any) -> bool:
    return isinstance(norm, LayerNorm | LayerNormFp32) and norm.weight is not None and norm.bias is not None


def _plain_timm_block(block: Any, settings: Model) -> bool:
    attn, mlp = block.attn, block.mlp
    same = (block.drop_path1, block.drop_path2, attn.q_norm, attn.k_norm, attn.norm, mlp.norm)
    drops = (attn.attn_drop, attn.proj_drop, mlp.drop1, mlp.drop2)
    return (
        type(attn) is TimmAttention
        and type(mlp) is TimmMlp
        and bool(_plain_timm(attn, settings))
        and all(isinstance(module, nn.Identity) for module in same)
        and all(module.p == 0 for module in drops)
    )


def _plain_timm(attn: Any, _: Model) -> Any:
    return attn.fused_attn and getattr(attn, "gate", None) is None and hasattr(attn, "norm")


def _in_half_precision(norm: Any, settings: Model) -> bool:
    return settings.precision in _HALF and _has_gain(norm)


def _cuts_patches(conv: Any, _: Model) -> bool:
    # On a CPU the convolution is as fast, and its sums are open_clip's to the last bit.
    return bool(conv.weight.is_cuda) and is_patch_embedding(conv)


def is_patch_embedding(conv: nn.Conv2d) -> bool:
    """Returns whether the convolution multiplies each patch of an image by itself: `PatchProduct` fits."""
    return (
        min(conv.kernel_size) >= _PATCH
        and conv.in_channels == _COLOURS
        and conv.groups == 1
        and conv.kernel_size == conv.stride
        and conv.padding == (0, 0)
        and conv.dilation == (1, 1)
    )


def _not_compiled(_: Any, settings: Model) -> bool:
    return not settings.compile  # a compiler fuses the plain form into one kernel


def _pools_one_token(tower: Any, _: Model) -> bool:
    pool = tower.text_pool_type if isinstance(tower, CLIP) else tower.pool_type
    return pool in _POOLED and tower.attn_mask is not None and getattr(tower, "cls_emb", None) is None


REPLACEMENTS: dict[type[nn.Module], Replacement] = {
    ResidualAttentionBlock: Replacement(FastBlock, _usual_block, "fused attention"),
    Transformer: Replacement(FastTransformer, lambda *_: True),
    TimmBlock: Replacement(FastTimmBlock, _plain_timm_block),
    nn.Sequential: Replacement(FastTimmBlocks, _of_timm_blocks),
    TimmAttention: Replacement(FastTimmAttention, _plain_timm, "fused attention"),
    LayerNorm: Replacement(FastLayerNorm, _in_half_precision, "half-precision layer norm"),
    LayerNormFp32: Replacement(FastLayerNormFp32, _in_half_precision, "half-precision layer norm"),
    QuickGELU: Replacement(_QuickGELU, _not_compiled, "recomputed QuickGELU"),
    AttentionPool2d: Replacement(_AttentionPool, lambda *_: True, "one-query pooling"),
    CLIP: Replacement(_Clip, _pools_one_token),
    TextTransformer: Replacement(_TextTower, _pools_one_token),
    nn.Conv2d: Replacement(PatchProduct, _cuts_patches, "patch product"),
    NaFlexEmbeds: Replacement(DevicePositions, lambda embeds, _: can_be_weighed(embeds), "weighed position"),
}
"""The replacement of each class. Subclasses of these classes stay as they are."""


def _text_tower(model: nn.Module) -> Any:
    """Returns open_clip's own text tower, which for `CLIP` is the model itself; None for another tower."""
    if type(model) is CLIP:
        return model
    text = model.text if type(model) is CustomTextCLIP else None
    return text if type(text) is TextTransformer else None


def _is_causal(mask: Tensor | None) -> bool:
    """Returns whether each token sees itself and those before it alone."""
    return mask is not None and torch.equal(mask, torch.full_like(mask, float("-inf")).triu(1))


def _padding_cut(model: nn.Module, settings: Model) -> CaptionLength | None:
    """Returns the rule for a text tower whose tokens see all but the padding; None as `_caption_length`.

    Dropout draws by sample and place, so that a shorter caption loses the same.
    """
    tower = model.text if type(model) is CustomTextCLIP else None
    padding = tower.masked_padding if isinstance(tower, TextTower) else modern_padding(tower)
    return None if padding is None or settings.compile else CaptionLength(padding=padding)


def _caption_length(text: Any, settings: Model) -> CaptionLength | None:
    """Returns the rule for a causal text tower; None if shorter captions could have other features."""
    blocks = list(text.transformer.modules())
    drops = any(
        isinstance(module, _RANDOM) and any(vars(module).get(name) for name in ("p", "drop_prob"))
        for module in blocks
    )
    if type(text) not in (_Clip, _TextTower) or drops or settings.compile:
        return None
    pool, end = (
        (text.text_pool_type, text.text_eos_id) if isinstance(text, CLIP) else (text.pool_type, text.eos_id)
    )
    return CaptionLength(end if pool == "eos" else None, packs=_takes_packed(text))


def _takes_packed(text: Any) -> bool:
    """Returns whether a causal text tower computes captions that are laid end to end."""

    def fits(block: Any) -> bool:
        ops = block.fused_ops if isinstance(block, FastBlock) else None
        return ops is not None and block.parts().has_tiles and text.context_length <= ops.longest_packed

    return isinstance(text, _Clip) and all(map(fits, text.transformer.resblocks))
