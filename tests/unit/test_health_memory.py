"""Out of memory, as Python and torch say it, and the numbers that go with it."""

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
    for text, held in ((hint(), "the rank holds "), (hint(3 * 2**20), "the rank held 3.0 GiB at its most")):
        assert held in text
        assert "left of" in text
        assert "optim.max_batch_size_per_gpu" in text
