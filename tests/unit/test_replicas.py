"""The checksum by which ranks compare their parameters."""

import pytest
import torch

from trainer.comm.replicas import _checksum, _digests, _digests_agree, _together


@pytest.mark.parametrize("count", [1, 2, 3, 8, 1001])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_checksum_differs_if_one_bit_does(count: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = _checksum(tensor)
    assert all(0 <= part < 2**64 for part in whole)
    raw = tensor.view(torch.uint8)
    for at in {0, raw.numel() // 2, raw.numel() - 1}:
        for bit in (1, 128):
            raw[at] ^= bit
            assert _checksum(tensor)[0] != whole[0]
            raw[at] ^= bit
    assert _checksum(tensor) == whole


def test_checksum_differs_if_values_are_exchanged() -> None:
    one = torch.arange(64, dtype=torch.float64)
    other = one.flip(0)
    assert _checksum(one)[0] == _checksum(other)[0]
    assert _checksum(one)[1] != _checksum(other)[1]


def test_checksum_depends_on_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1001)
    part = tensor[3:998]
    whole = _checksum(part)
    assert _checksum(part.clone()) == whole, "it begins where no word of memory begins"
    monkeypatch.setattr("trainer.comm.replicas._CHUNK", 7)
    assert _checksum(part) == whole
    assert _checksum(torch.zeros(0)) == (0, 0)


NAMES, SPLIT = ["shared", "rows"], [False, True]


def of_rank(part: str, shared: int, rows: int, names: list[str] | None = None) -> tuple[str, str, str]:
    return (*_digests(names or NAMES, [(shared, 0), (rows, 0)], SPLIT), part)


@pytest.mark.parametrize(
    ("other", "agree"),
    [
        (of_rank("first", 1, 5), True),
        (of_rank("second", 1, 6), True),
        (of_rank("second", 2, 6), False),
        (of_rank("first", 1, 6), False),
        (of_rank("first", 1, 5, ["shared", "other"]), False),
    ],
    ids=["equal", "other rows", "other shared values", "the same rows differ", "other names"],
)
def test_digests_agree_if_shared_values_do_and_rows_of_one_part_do(
    other: tuple[str, str, str], agree: bool
) -> None:
    assert _digests_agree([of_rank("first", 1, 5), other]) == agree


def test_small_tensors_of_one_dtype_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.comm.replicas._TOGETHER", 16)
    tensors = [
        torch.zeros(2),
        torch.zeros((), dtype=torch.int64),
        torch.zeros(2),
        torch.zeros(1),
        torch.zeros(9),
    ]
    groups = [[tensor.numel() for tensor in group] for group in _together(tensors)]
    assert groups == [[2, 2], [1], [9], [1]]
    assert not list(_together([]))
