"""A checkpoint leaves the GPU in page-locked memory, all of it at once, while the host goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import run, setup_of
from tools import nullgpu
from trainer.checkpoint import files, state
from trainer.checkpoint.writer import CheckpointWriter
from trainer.comm.protocol import Comm


def test_the_training_thread_waits_for_no_copy_and_all_are_from_pinned_memory(
    tmp_path: Path, gpu: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for the step before it, whose gradient it must know, and that is by asking."""
    seen: list[Any] = []
    plain = CheckpointWriter.save

    def watched(self: CheckpointWriter, *given: Any) -> None:
        self._join()  # what `reserve` began
        with nullgpu.watch() as watching:
            plain(self, *given)
            self.wait()
        seen.append(watching)

    monkeypatch.setattr(CheckpointWriter, "save", watched)
    setup = setup_of(
        tmp_path,
        gpu,
        dict,
        model={"precision": "bf16"},
        optim={"steps": 3},
        eval={"zero_shot": (), "retrieval": ()},
        checkpoint={"every_steps": 1},
    )
    run(setup)
    assert len(seen) == 3
    for one in seen:
        assert one.waits == [], one.table()
        assert one["d2h_pageable"] == 0
        assert one["host_allocs"] == 0, "the memory was taken beside the first step"
    tensors = len(setup.clip.model.state_dict()) + 3 * len(setup.train_step.optimizer.state)
    assert seen[-1]["d2h_pinned"] == tensors
    for folder in files.newest_first(setup.run.checkpoints):
        files.verify(folder)


def test_tensors_of_any_layout_and_type_keep_their_shape(gpu: Comm) -> None:
    tensors = {
        "wide": torch.zeros(2, 3, 4, 4, device=gpu.device).to(memory_format=torch.channels_last),
        "count": torch.zeros((), dtype=torch.int64, device=gpu.device),
        "half": torch.zeros(5, dtype=torch.bfloat16, device=gpu.device),
        "none": torch.zeros(0, 7, device=gpu.device),
        "host": torch.arange(3),
    }
    copies = state.Snapshot({"file": tensors}).get()["file"]
    for name, tensor in tensors.items():
        copy = copies[name]
        assert (copy.shape, copy.dtype, copy.device.type) == (tensor.shape, tensor.dtype, "cpu")
        assert copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == tensor.nbytes
    assert copies["host"].tolist() == [0, 1, 2]
