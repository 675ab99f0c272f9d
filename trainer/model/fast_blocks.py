"""Blocks of open_clip's and timm's transformers, whose attention is one call of torch's fused attention.

Under autocast a block of open_clip rounds all its parameters in one kernel. On a GPU blocks are fused, see
`fused_block.py`, and each leaves its last sum to the next one.
"""

from collections.abc import Iterable
from typing import Any

import torch
from open_clip.transformer import ResidualAttentionBlock, Transformer
from timm.layers import Attention  # type: ignore[attr-defined]
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.model.fast_norms import FAST_NORMS, is_half, normalised
from trainer.model.fused_block import (
    BlockOps,
    BlockParts,
    Unsummed,
    attended,
    fused_forward,
    heads_of,
    kind_of_gelu,
)
from trainer.model.rounding import rounded


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


class FastTimmAttention(Attention):
    """Attention of timm's vision transformers without a gate; the input is [B, T, width]."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = heads_of(self.qkv(x), self.num_heads)
        dropped = self.attn_drop.p if self.training else 0.0
        out = F.scaled_dot_product_attention(
            self.q_norm(q), self.k_norm(k), v, attn_mask=attn_mask, dropout_p=dropped, is_causal=is_causal
        )
        seen: Tensor = self.proj_drop(self.proj(self.norm(out.transpose(1, 2).flatten(2))))
        return seen


class FastTimmBlock(Block):
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
