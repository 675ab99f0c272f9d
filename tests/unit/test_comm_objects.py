"""Objects that ranks send each other arrive unchanged, and nothing that arrives is executed."""

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.comm.objects import decode, encode
from trainer.errors import InputError, MachineError, Preempted, StorageError, decode_error, encode_error


def test_values_come_back_as_they_were() -> None:
    values: list[Any] = [None, True, 0.1, math.inf, 2**70, "line\n\0é", "file-\udcff", [], (1, (2.5, [None]))]
    values += [{"state": {0: {"step": 3.0}}, (1, "a"): ["x"]}, {"tuple": 1, "mapping": 2}]
    assert repr(decode(encode(values))) == repr(values)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", torch.zeros(1), Path()])
def test_an_object_that_is_no_plain_value_is_refused_at_the_sender(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        encode([value])


class Touch:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    message = torch.frombuffer(bytearray(pickle.dumps(Touch(tmp_path / "ran"))), dtype=torch.uint8)
    with pytest.raises(ValueError, match="a message that no rank sends"):
        decode(message)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"other": 1}', '{"mapping": [[[], 1]]}', "{", '{"mapping": 7}']
)
def test_bytes_that_no_rank_sends_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a message that no rank sends"):
        decode(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))


@pytest.mark.parametrize("kind", [InputError, StorageError, MachineError, Preempted])
def test_an_error_is_the_same_on_every_rank(kind: type[Exception]) -> None:
    found = decode_error(decode(encode(encode_error(kind("two\nlines")))))
    assert type(found) is kind
    assert str(found) == "two\nlines"
    assert decode_error(encode_error(None)) is None
