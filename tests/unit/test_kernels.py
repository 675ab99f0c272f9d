"""Replaced modules compute what those of open_clip and timm do; captions are cut where that is exact."""

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from open_clip.transformer import LayerNorm, ResidualAttentionBlock
from timm.layers import Attention  # type: ignore[attr-defined]
from timm.layers.helpers import to_2tuple
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.jobs import RESNET, VIT, tiny_job
from tests.support.steps import (
    Clip,
    MicroBatch,
    built,
    fuse_as_on_a_gpu,
    grads,
    train_step,
    with_model,
)
from tests.support.tf32 import Tf32
from tests.support.tiles import tiles_of
from trainer.comm.protocol import Comm
from trainer.config import Job, Model
from trainer.model.caption_length import CaptionLength
from trainer.model.fused_block import Unsummed
from trainer.model.host_compiler import missing_parts
from trainer.model.kernels import PatchProduct, is_patch_embedding, use_kernels
from trainer.model.packed_captions import Packed, pack
from trainer.model.rank_loss import RankLoss, Tiles
from trainer.model.tile_kernels import PLAIN, fused, kernels_for, problem_of

SAMPLES, CONTEXT, END = 8, 24, 49407
TINY: dict[str, Any] = json.loads(Path(VIT).read_text())
TEXT: dict[str, Any] = {**TINY["text_cfg"], "context_length": CONTEXT}
EOS = {"pool_type": "eos", "eos_id": END}

CONFIGS: dict[str, dict[str, Any]] = {
    "clip": {},
    "custom text": {"custom_text": True, "text_cfg": {**TEXT, **EOS}},
    "layer scale, pooled mean": {"vision_cfg": {"ls_init_value": 0.5, "pool_type": "avg"}},
    "quick gelu": {"quick_gelu": True},
    "one-query pooling": {
        "vision_cfg": {**json.loads(Path(RESNET).read_text())["vision_cfg"], "head_width": 64}
    },
    "gelu by tanh": {"vision_cfg": {"act_kwargs": {"approximate": "tanh"}}},
    "norm of queries and keys": {"text_cfg": {**TEXT, "qk_norm": True}},
    "bidirectional text": {
        "custom_text": True,
        "text_cfg": {**TEXT, "no_causal_mask": True, "pool_type": "last"},
    },
    "appended class token": {"custom_text": True, "text_cfg": {**TEXT, "embed_cls": True}},
}
"""Parts of a model's config, over those of the tiny ViT."""


def job_of(folder: Path, config: str, **sections: Any) -> Job:
    keys = CONFIGS[config]
    vision = {**TINY["vision_cfg"], **keys.get("vision_cfg", {})}
    path = folder / f"kernels-{config.replace(' ', '-').replace(',', '')}.json"
    path.write_text(json.dumps({**TINY, "text_cfg": TEXT, **keys, "vision_cfg": vision}))
    optim = {"global_batch_size": SAMPLES, **sections.pop("optim", {})}
    return tiny_job(config=str(path), optim=optim, **sections)


def clip_of(job: Job, comm: Comm, kernels: str) -> Clip:
    return built(with_model(job, kernels=kernels), comm)


def captions(longest: int) -> Tensor:
    """Token ids [SAMPLES, CONTEXT] that end in the end token, the longest at `longest`; padded with zeros."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 1000, (SAMPLES, CONTEXT), generator=generator)
    for row, end in zip(tokens, range(longest - SAMPLES, longest), strict=True):
        row[end], row[end + 1 :] = END, 0
    return tokens


def gradients(job: Job, comm: Comm, clip: Clip, tokens: Tensor | Packed) -> dict[str, Tensor]:
    """Returns the gradient of each parameter, of the loss of one global batch."""
    model: Any = clip.model.train()
    with torch.no_grad():  # at their first values, gains round to themselves
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter), dtype=parameter.dtype))
            assert name in model.state_dict()
    step = train_step(job, comm, model)
    generator = torch.Generator().manual_seed(2)
    sides = to_2tuple(model.visual.image_size)
    images = torch.randn(SAMPLES, 3, *sides, generator=generator, dtype=torch.float64)
    size = job.optim.max_batch_size_per_gpu or SAMPLES
    assert isinstance(size, int)
    step.gradients(
        [
            MicroBatch(i.to(next(model.parameters()).dtype), t)
            for i, t in zip(
                images.split(size),
                [tokens] if isinstance(tokens, Packed) else tokens.split(size),
                strict=True,
            )
        ],
        step=0,
    )
    return grads(model)


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(got) == list(wanted)
    for name, gradient in wanted.items():
        difference = f"{name} differs by {float((got[name] - gradient).abs().max())}"
        torch.testing.assert_close(got[name], gradient, rtol=1e-12, atol=1e-13, msg=difference)


def error(got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((got[name] - exact[name]).square().sum()) for name in exact))


@pytest.mark.parametrize("config", CONFIGS)
def test_every_weight_gets_the_gradient_of_the_plain_modules(
    alone: Comm, tmp_path: Path, config: str
) -> None:
    """Captions are cut behind the longest one, but where later tokens count."""
    job, tokens = job_of(tmp_path, config, model={"precision": "fp64"}), captions(13)
    plain, fast = clip_of(job, alone, "plain"), clip_of(job, alone, "fast")
    length = fast.kernels.caption_length
    assert (length is None) == (config in ("bidirectional text", "appended class token"))
    cut = tokens[:, : length(tokens)] if length else tokens
    assert cut.shape[1] == (16 if length else CONTEXT)
    assert str(plain.kernels) == "plain"
    assert str(fast.kernels).startswith("fast: ")
    said = {"quick gelu": "recomputed QuickGELU", "one-query pooling": "one-query pooling"}
    assert said.get(config, "") in str(fast.kernels)
    assert list(fast.model.state_dict()) == list(plain.model.state_dict())
    fast.model.load_state_dict(plain.model.state_dict())
    assert_equal(gradients(job, alone, fast, cut), gradients(job, alone, plain, tokens))


@pytest.mark.parametrize(("normed", "causal"), [(True, False), (False, True)])
def test_attention_of_timm_gives_the_same_gradients(normed: bool, causal: bool) -> None:
    torch.manual_seed(0)
    plain = Attention(24, 3, qkv_bias=True, qk_norm=normed, norm_layer=nn.LayerNorm).double()
    fast = copy.deepcopy(plain)
    assert str(use_kernels(fast, tiny_job().model)) == "fast: 1 fused attention"
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    for attention in (plain, fast):
        attention(x, is_causal=causal).square().sum().backward()
    got, wanted = (
        {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        for module in (fast, plain)
    )
    assert_equal(got, wanted)


def fuse_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are fused as on a GPU, by the plain form of what Triton computes there, and in float64."""
    fuse_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr("trainer.model.kernels._HALF", ("fp64",))
    monkeypatch.setattr("trainer.model.kernels._rounds", lambda _: True)
    monkeypatch.setattr("torch.get_autocast_dtype", lambda _: torch.float64)
    monkeypatch.setattr("trainer.model.fused_block._LANES", range(64))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("config", ["clip", "quick gelu", "layer scale, pooled mean", "gelu by tanh"])
def test_fused_blocks_give_every_weight_the_gradient_of_the_plain_modules(
    alone: Comm, tmp_path: Path, config: str, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each leaves its last sum to the next one, except where activations are checkpointed."""
    model = {"precision": "fp64", "grad_checkpointing": checkpointed}
    job, tokens = job_of(tmp_path, config, model=model), captions(CONTEXT - 1)
    expected = gradients(job, alone, clip_of(job, alone, "plain"), tokens)
    fuse_in_float64(monkeypatch)
    fused = clip_of(job, alone, "fast")
    blocks = [module for module in fused.model.modules() if isinstance(module, ResidualAttentionBlock)]
    left = []
    for block in blocks:
        block.register_forward_hook(lambda *call: left.append(isinstance(call[2], Unsummed)))
    assert_equal(gradients(job, alone, fused, tokens), expected)
    assert len(blocks) > 2
    assert sum(left[: len(blocks)]) == (0 if checkpointed else len(blocks) - 2)


@pytest.mark.parametrize("longest", [9, CONTEXT - 1])
def test_packed_captions_give_every_weight_the_gradient_of_whole_ones(
    alone: Comm, tmp_path: Path, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, tokens = job_of(tmp_path, "clip", model={"precision": "fp64"}), captions(longest)
    expected = gradients(job, alone, clip_of(job, alone, "plain"), tokens)
    fuse_in_float64(monkeypatch)
    fused = clip_of(job, alone, "fast")
    assert str(fused.kernels).endswith("packed captions")
    rule = fused.kernels.caption_length
    assert rule is not None
    packed = pack(tokens, rule.needed(tokens), torch.device("cpu"))
    assert len(packed.ids) < tokens.numel()
    assert_equal(gradients(job, alone, fused, packed), expected)


@pytest.mark.parametrize(("ends", "length"), [([0], 8), ([7], 8), ([8], 16), ([3, 15], 16), ([16], 20)])
def test_captions_are_cut_to_a_multiple_of_eight_that_holds_every_end(ends: list[int], length: int) -> None:
    tokens = torch.ones(len(ends), 20, dtype=torch.int64)
    for row, end in zip(tokens, ends, strict=True):
        row[end] = 9
        row[end + 1 :] = 0
    for rule in (CaptionLength(), CaptionLength(end_token=9), CaptionLength(padding=0)):
        assert rule(tokens) == length


def test_the_end_token_is_pooled_where_it_stands_first() -> None:
    tokens = torch.tensor([[5, 9, 2, *[2] * 16, 7]])
    # Of the last one there is none: open_clip pools the first token.
    assert [CaptionLength(end_token=token)(tokens) for token in (2, 7, 1)] == [8, 20, 8]


@pytest.mark.parametrize(
    ("config", "precision", "fused"),
    [("clip", "bf16", False), ("custom text", "bf16", True), ("quick gelu", "fp16", True)],
)
def test_in_half_precision_the_gradient_is_as_near_to_that_of_float64_as_the_plain_one(
    alone: Comm, tmp_path: Path, config: str, precision: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fused:  # as on a GPU, by the plain form of what Triton computes there
        fuse_as_on_a_gpu(monkeypatch)
    tokens = captions(CONTEXT - 1)
    exact = gradients(
        job := job_of(tmp_path, config, model={"precision": "fp64"}),
        alone,
        clip_of(job, alone, "plain"),
        tokens,
    )
    half = job_of(tmp_path, config, model={"precision": precision})
    fast = clip_of(half, alone, "fast")
    assert "half-precision layer norms" in str(fast.kernels)
    assert ("fused blocks" in str(fast.kernels)) is fused
    assert ("attention in Triton up to" in str(fast.kernels)) is fused
    norms = [module for module in fast.model.modules() if isinstance(module, nn.LayerNorm)]
    assert LayerNorm not in map(type, norms)
    plain = error(gradients(half, alone, clip_of(half, alone, "plain"), tokens), exact)
    found = error(gradients(half, alone, fast, tokens), exact)
    assert 0 < found < 1.2 * plain


@pytest.mark.parametrize(("size", "bias"), [(32, False), (35, True)])
def test_patches_are_cut_for_a_product_that_has_the_gradient_of_the_convolution(
    size: int, bias: bool
) -> None:
    """Also where the side is no multiple of the patch."""
    plain = nn.Conv2d(3, 12, 8, 8, bias=bias, dtype=torch.float64)
    fast = copy.deepcopy(plain)
    assert is_patch_embedding(fast)
    fast.__class__ = PatchProduct
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    for module in (plain, fast):
        out = module(images)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    torch.testing.assert_close(fast(images), plain(images), rtol=1e-12, atol=1e-12)
    for one, other in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "stride", "colours"), [(4, 4, 3), (8, 4, 3), (8, 8, 4)])
def test_a_convolution_that_cuts_no_patches_of_an_image_stays(size: int, stride: int, colours: int) -> None:
    assert not is_patch_embedding(nn.Conv2d(colours, 12, size, stride))


def test_tiles_in_tf32_are_as_near_to_float64_in_bfloat16_as_tiles_in_float32(
    alone: Comm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the largest logit scale, which enlarges the rounding errors of logits most."""
    tokens = captions(CONTEXT - 1)
    built_as = {
        precision: clip_of(job_of(tmp_path, "clip", model={"precision": precision}), alone, "fast")
        for precision in ("fp64", "bf16")
    }
    for clip in built_as.values():
        clip.model.get_parameter("logit_scale").data.fill_(math.log(100))

    def found(precision: str) -> dict[str, Tensor]:
        job = job_of(tmp_path, "clip", model={"precision": precision})
        return gradients(job, alone, copy.deepcopy(built_as[precision]), tokens)

    with tiles_of(3):
        exact, in_float32 = found("fp64"), found("bf16")
    monkeypatch.setattr(RankLoss, "_tiling", lambda *_: Tiles(3, tf32=True))
    with Tf32() as tf32:
        in_tf32 = found("bf16")
    assert tf32.products == 6 * 9, "logits of three by three tiles four times, and their gradients twice"
    assert error(in_tf32, in_float32) > 0
    assert error(in_tf32, exact) < 1.2 * error(in_float32, exact)


# The functions of a tile of logits: as torch.compile makes them they compute what the plain ones do.

compiles = pytest.mark.skipif(bool(missing_parts()), reason=f"lacks {' and '.join(missing_parts())}")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    torch._dynamo.reset()
    yield fused()
    torch._dynamo.reset()


@compiles
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_trial_at_a_start_finds_no_fault_with_the_fused_functions(compiled: Any) -> None:
    assert problem_of(compiled, CPU) == ""


def test_functions_that_fail_or_compute_something_else_are_not_used() -> None:
    def fails(*_: Tensor) -> Tensor:
        raise RuntimeError("no such device\nand more")

    def twice(logits_RC: Tensor, norm_R: Tensor, norm_C: Tensor) -> Tensor:
        return 2 * PLAIN.clip_weights(logits_RC, norm_R, norm_C)

    assert problem_of(PLAIN, CPU) == ""
    failed = problem_of(replace(PLAIN, clip_weights=fails), CPU)
    assert failed == "torch.compile failed: RuntimeError: no such device"
    wrong = problem_of(replace(PLAIN, clip_weights=twice), CPU)
    assert wrong == "weights of CLIP of torch.compile differ from the plain ones"


def test_many_tiles_are_fused_on_a_gpu_alone_and_not_where_the_job_wants_plain_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kernels_for(Model(name="ViT-B-32"), CPU, 100) == (PLAIN, "")
    gpu = torch.device("cuda")
    assert kernels_for(Model(name="ViT-B-32"), gpu, 2) == (PLAIN, "")
    found = kernels_for(Model(name="ViT-B-32", kernels="plain"), gpu, 100)
    assert found == (PLAIN, 'not fused (model.kernels = "plain")')
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernels, clause = kernels_for(Model(name="ViT-B-32"), gpu, 100)
    assert kernels == PLAIN
    assert clause.startswith("not fused (this node lacks a C++ compiler (no-such-compiler)")


class Products(TorchDispatchMode):
    """Remembers the shape of each product."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize(("rows", "shapes"), [(2, {(2, 32), (2, 30)}), (8, {(8, 8)}), (12, {(8, 8), (4, 8)})])
def test_tiles_of_a_rank_with_few_rows_are_wider_and_as_large(
    rows: int, shapes: set[tuple[int, int]]
) -> None:
    """Rank 0 of a world with 60 or more samples."""
    from tests.support.echo import Echo

    features = normalize(torch.randn(rows, 4), dim=1)
    loss = RankLoss(tiny_job(), Echo(60 // rows + 1, "cpu"))  # type: ignore[arg-type]
    with tiles_of(8), Products() as products:
        loss(features, features, torch.tensor(5.0), None)
    assert set(products.shapes) == shapes
    assert max(height * width for height, width in products.shapes) <= 8 * 8
