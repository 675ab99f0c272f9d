"""Peak memory of the loss and its backward pass at sizes of real runs, by torch's own allocator."""

import pytest
import torch

from tests.support.echo import Echo
from tests.support.jobs import tiny_job
from trainer.config.loss_tile import plain_bytes
from trainer.model.rank_loss import RankLoss

MIB = 2**20
SIZES = pytest.mark.parametrize(("samples", "ranks", "width"), [(32_768, 8, 512), (65_536, 8, 1024)])
KINDS = pytest.mark.parametrize("kind", ["clip", "siglip"])


@pytest.fixture(autouse=True, scope="module")
def workspaces() -> None:
    """Takes the memory of cuBLAS, which a model's products have taken before the loss."""
    some = torch.ones(8, 8, device="cuda", requires_grad=True)
    (some @ some).sum().backward()


def peak(kind: str, samples: int, ranks: int, width: int, tile: int) -> int:
    """Peak bytes on one rank beyond its own features."""
    image, text = (torch.empty(samples // ranks, width, device="cuda", requires_grad=True) for _ in range(2))
    scale, bias = (torch.tensor(number, device="cuda", requires_grad=True) for number in (10.0, -10.0))
    loss = RankLoss(
        tiny_job(optim={"loss": kind, "loss_tile": tile}),
        Echo(ranks, "cuda"),  # type: ignore[arg-type]
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss(image, text, scale, bias if kind == "siglip" else None).backward()
    return int(torch.cuda.max_memory_allocated()) - before


@KINDS
@SIZES
@pytest.mark.parametrize("tile", [512, 2048])
def test_a_loss_in_tiles_takes_the_gathered_features_four_tiles_and_little_more(
    kind: str, samples: int, ranks: int, width: int, tile: int
) -> None:
    found = peak(kind, samples, ranks, width, tile)
    assert found <= 2 * samples * width * 4 + 4 * tile**2 * 4 + 32 * MIB, f"{found / MIB:.0f} MiB"


@KINDS
@SIZES
def test_the_plain_loss_takes_what_the_rule_reckons_with(
    kind: str, samples: int, ranks: int, width: int
) -> None:
    ruled = plain_bytes(samples // ranks, samples, width)
    assert peak(kind, samples, ranks, width, 0) == pytest.approx(ruled, rel=0.05)
