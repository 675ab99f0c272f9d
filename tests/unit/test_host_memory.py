"""Copies in the host's memory have memory of their own, as they were."""

import io

import torch

from trainer.comm.host_memory import HostCopy


def test_a_copy_stays_as_it_was_and_is_contiguous() -> None:
    tensors = [torch.arange(6.0).view(2, 3).T, torch.tensor(3, dtype=torch.int64)]
    copy = HostCopy(tensors)
    tensors[0].zero_()
    wide, count = copy.get()
    assert wide.is_contiguous()
    assert (wide.tolist(), int(count)) == ([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], 3)


def test_a_saved_copy_is_as_long_as_itself() -> None:
    """A part of a larger memory would be saved with the whole of it."""
    (copy,) = HostCopy([torch.zeros(1_000_000)[:10]]).get()
    file = io.BytesIO()
    torch.save(copy, file)
    assert len(file.getvalue()) < 10_000
