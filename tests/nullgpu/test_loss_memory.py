"""Peak memory of the loss and its backward pass at sizes of real runs, by torch's own allocator."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.echo import Echo
from tests.support.jobs import tiny_job
from tests.support.tiles import tiles_of
from tools import nullgpu
from trainer.estimate.step_memory import plain_loss_bytes
from trainer.model.rank_loss import RankLoss

MIB = 2**20
SIZES = pytest.mark.parametrize(("samples", "ranks", "width"), [(32_768, 8, 512), (65_536, 8, 1024)])
KINDS = pytest.mark.parametrize("kind", ["clip", "siglip"])


@pytest.fixture(autouse=True, scope="module")
def workspaces() -> None:
    """Takes the memory of cuBLAS, which a model's products have taken before the loss."""
    some = torch.ones(8, 8, device="cuda", requires_grad=True)
    (some @ some).sum().backward()


class Loss:
    """A loss of one rank on features of random samples, with its backward pass."""

    def __init__(self, kind: str, samples: int, ranks: int, width: int, **model: Any) -> None:
        n = samples // ranks
        self._inputs = [torch.empty(n, width, device="cuda", requires_grad=True) for _ in range(2)]
        self._inputs += [torch.tensor(number, device="cuda", requires_grad=True) for number in (10.0, -10.0)]
        self._loss = RankLoss(
            tiny_job(model=model, optim={"loss": kind}),
            Echo(ranks, "cuda"),  # type: ignore[arg-type]
        )
        self._kind = kind

    def __call__(self) -> None:
        image, text, scale, bias = self._inputs
        self._loss(image, text, scale, bias if self._kind == "siglip" else None).backward()

    def forget(self) -> None:
        for tensor in self._inputs:
            tensor.grad = None


def peak(loss: Loss) -> int:
    """Peak bytes on one rank beyond its own features."""
    loss()  # kernels are compiled at their first call
    loss.forget()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss()
    return int(torch.cuda.max_memory_allocated()) - before


def launches(loss: Loss) -> int:
    loss()
    with nullgpu.watch() as seen:
        loss()
    assert seen.waits == [], seen.table()
    return int(seen["launches"])


@KINDS
@SIZES
@pytest.mark.parametrize("tile", [512, 2048])
def test_a_loss_in_tiles_takes_features_and_gradients_four_tiles_and_little_more(
    kind: str, samples: int, ranks: int, width: int, tile: int
) -> None:
    with tiles_of(tile):
        found = peak(Loss(kind, samples, ranks, width))
    features = (2 * samples + samples // ranks) * width * 4
    assert found <= features + 4 * tile**2 * 4 + 8 * MIB, f"{found / MIB:.0f} MiB"


@KINDS
@SIZES
def test_the_plain_loss_takes_what_the_rule_reckons_with(
    kind: str, samples: int, ranks: int, width: int
) -> None:
    ruled = plain_loss_bytes(samples // ranks, samples, width)
    with tiles_of(0):
        assert peak(Loss(kind, samples, ranks, width)) == pytest.approx(ruled, rel=0.05)


@pytest.mark.parametrize(("kind", "plain", "fused"), [("clip", 820, 180), ("siglip", 340, 110)])
def test_fused_tiles_take_few_launches(kind: str, plain: int, fused: int) -> None:
    """4,096 samples, as one of 8 ranks. Tiles are read once, by a kernel that torch.compile made."""
    found = {kernels: launches(Loss(kind, 32_768, 8, 512, kernels=kernels)) for kernels in ("plain", "fast")}
    assert found["plain"] <= plain
    assert found["fast"] <= fused


def test_a_rank_with_few_samples_of_many_takes_few_launches() -> None:
    """256 samples, as one of 64 ranks, in tiles of 256 x 16,384; of 2,048 columns there would be more."""
    found = launches(Loss("clip", 16_384, 64, 768))
    assert found <= 65


@pytest.mark.parametrize(
    ("precision", "kernels", "tf32"),
    [("bf16", "fast", True), ("fp16", "fast", True), ("bf16", "plain", False), ("fp32", "fast", False)],
)
def test_products_of_tiles_are_in_tf32_only_where_half_precision_has_rounded_more(
    precision: str, kernels: str, tf32: bool
) -> None:
    """And only inside the loss."""
    loss, inside = Loss("clip", 64, 2, 32, precision=precision, kernels=kernels), list[bool]()

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                inside.append(torch.backends.cuda.matmul.allow_tf32)
            return func(*args, **(kwargs or {}))

    with Asks():  # type: ignore[no-untyped-call]
        loss()
    assert set(inside) == {tf32}
    assert not torch.backends.cuda.matmul.allow_tf32
