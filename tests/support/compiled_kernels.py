"""Compiles the kernels of fused blocks for the GPU that is there, at the widths and lengths of real models.

`python -m tests.support.compiled_kernels` on a null GPU. Triton leaves what it makes in TRITON_CACHE_DIR.
"""

import torch
from torch import Tensor

from trainer.model.fused_block import fused

WIDTHS = (512, 768, 1024, 1664)
"""Widths of the towers of ViT-B, ViT-L and ViT-bigG."""
LENGTHS = {50: False, 77: True, 128: False, 197: False, 257: False, 577: False}
"""Tokens, and whether attention is causal."""


def main() -> None:
    device = torch.device("cuda")
    ops = fused(device)

    def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    for width in WIDTHS:
        gain, grad = some(width, dtype=torch.float32), some(4, 50, width)
        for dtype in (torch.bfloat16, torch.float32):
            for added in (None, grad):
                stream, _, mean, rstd = ops.norm(
                    some(4, 50, width, dtype=dtype), added, gain, gain, 1e-5, grad.dtype
                )
            for passed in (None, stream):
                ops.norm_backward(grad, passed, stream, mean, rstd, gain, grad.dtype)
    for kind in ("none", "tanh", "quick"):
        ops.gelu_backward(some(200, 3072), some(200, 3072), kind)
    starts = torch.arange(0, 80, 20, device=device)
    for lanes in (32, 64):
        for tokens, causal, packed in (
            *((tokens, causal, None) for tokens, causal in LENGTHS.items() if tokens <= ops.longest),
            (60, True, starts),
        ):
            joint = some(1, tokens, 3 * 4 * lanes)
            out, kept = ops.attention(joint, 4, causal, packed)
            ops.attention_backward(joint, kept, out, 4, causal, packed)


if __name__ == "__main__":
    main()
