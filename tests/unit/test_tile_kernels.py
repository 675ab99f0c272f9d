"""The functions of a tile of logits: as torch.compile makes them they compute what the plain ones do."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.jobs import tiny_job
from tests.support.tiles import tiles_of
from trainer.config import Model
from trainer.model.host_compiler import missing_parts
from trainer.model.rank_loss import RankLoss
from trainer.model.tile_kernels import PLAIN, fused, kernels_for, problem_of

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
