"""Two ranks with NCCL's stand-in: DDP and the gathers make the host wait for nothing either."""

from pathlib import Path

import pytest

from tests.support.start import start


@pytest.mark.parametrize(("loss", "loss_tile"), [("clip", 0), ("clip", 4), ("siglip", 4)])
def test_no_rank_waits_in_a_step_once_ddp_has_timed_its_first_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, loss_tile: int
) -> None:
    monkeypatch.setenv("NULLGPU_DEVICES", "2")
    done = start("torch", "clipship", 2, "tests.support.null_gpu_rank", str(tmp_path), loss, str(loss_tile))
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank} waited for nothing, reduced " in done.stdout
