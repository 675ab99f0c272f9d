"""Out of memory, as Python and torch say it, and the numbers that go with it."""

import os

import pytest
import torch

from trainer.health.memory import hint, is_out_of_memory


def test_each_library_says_it_in_its_own_way() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(2**55)
    assert is_out_of_memory(found.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA"))
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_hint_has_numbers_and_advice() -> None:
    for text in (hint(), hint(os.getpid())):
        assert "the rank holds " in text
        assert "GiB" in text
        assert "optim.max_batch_size_per_gpu" in text
    assert "holds" not in hint(2**22 + 1), "a process that is gone has no number"
