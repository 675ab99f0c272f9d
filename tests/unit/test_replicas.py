"""Ranks compare their parameters: one bit that differs is found, and rows are those of each part."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.thread_ranks import run_ranks
from trainer.comm.replicas import ReplicaError, check_replicas

Held = tuple[str, dict[str, Tensor]]
"""The part of a rank, and its tensors by name; those called "rows" are split."""


def said(*ranks: Held) -> str:
    """What ranks say that compare these tensors; "" if they agree."""

    def rank_main(comm: Any) -> str:
        part, tensors = ranks[comm.world.rank]
        parameters = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
        shards: Any = SimpleNamespace(
            parameters=parameters, split=frozenset(["rows"]), part=part, state=lambda: tensors
        )
        try:
            check_replicas(comm, shards, torch.optim.SGD(parameters.values(), lr=0.1))
        except ReplicaError as error:
            return str(error)
        return ""

    first, *others = run_ranks(len(ranks), rank_main)
    assert others == [first] * len(others), "all ranks say the same"
    return first


def whole(tensor: Tensor) -> Held:
    return "all", {"weight": tensor}


@pytest.mark.parametrize("count", [1, 3, 1001])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_one_bit_that_differs_is_found(count: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    other = tensor.clone()
    raw = other.view(torch.uint8)
    for at in {0, raw.numel() // 2, raw.numel() - 1}:
        for bit in (1, 128):
            raw[at] ^= bit
            assert said(whole(tensor), whole(other), whole(tensor)).endswith("on\nrank 1: weight")
            raw[at] ^= bit
    assert said(whole(tensor), whole(other)) == ""
    if count > 1:
        assert "rank 1: weight" in said(whole(tensor), whole(tensor.flip(0))), "the same values, exchanged"


def of_rank(part: str, shared: int, rows: int, name: str = "rows") -> Held:
    return part, {"shared": torch.tensor([shared]), name: torch.tensor([rows])}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (of_rank("first", 1, 5), ""),
        (of_rank("second", 1, 6), ""),
        (of_rank("second", 2, 6), "rank 1: shared"),
        (of_rank("first", 1, 6), "rank 1: rows"),
        (of_rank("first", 1, 5, "other"), "rank 1: other, rows"),
    ],
    ids=["equal", "other rows", "other shared values", "the same rows differ", "other names"],
)
def test_ranks_agree_if_shared_values_do_and_rows_of_one_part_do(other: Held, expected: str) -> None:
    assert said(of_rank("first", 1, 5), other).partition("on\n")[2] == expected
