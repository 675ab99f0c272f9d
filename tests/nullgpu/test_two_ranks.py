"""Two ranks with NCCL's stand-in: DDP, FSDP and the gathers make the host wait for nothing either."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.jobs import VIT, tiny_job
from tests.support.start import start
from trainer.config import Model
from trainer.config.batch_plan import plan
from trainer.model.architecture import architecture
from trainer.model.scaling import collectives

STEPS = 4
"""Steps that a rank watches; every second one is logged, with a small gather of its own."""


def expected(loss: str, loss_tile: int) -> Counter[str]:
    """Bytes that a rank gives to each kind of collective in a step, by the arithmetic of `plan scaling`."""
    shape, job = architecture(Model(name=VIT)), tiny_job(optim={"loss": loss})
    assert shape is not None
    given = Counter[str]()
    for one in collectives(shape, job, plan(job, 2), "torch", 2**20, tiles=loss_tile > 0):
        given[one.what] += int(one.nbytes)
    return given


def output(
    folder: Path, monkeypatch: pytest.MonkeyPatch, loss: str, loss_tile: int, backend: str = "torch"
) -> str:
    """Returns what two ranks print that have waited for nothing."""
    monkeypatch.setenv("NULLGPU_DEVICES", "2")
    words = (str(folder), loss, str(loss_tile), backend)
    done = start(backend, "clipship", 2, "tests.support.null_gpu_rank", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank} waited for nothing, reduced " in done.stdout
    return done.stdout


def test_no_rank_that_splits_the_model_waits_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output(tmp_path, monkeypatch, "clip", 4, "fsdp")


@pytest.mark.parametrize(("loss", "loss_tile"), [("clip", 0), ("clip", 4), ("siglip", 4)])
def test_no_rank_waits_in_a_step_once_ddp_has_timed_its_first_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, loss_tile: int
) -> None:
    printed = output(tmp_path, monkeypatch, loss, loss_tile)
    for rank in (0, 1):
        given = json.loads(printed.split(f"rank {rank} gave ")[1].splitlines()[0])
        by_arithmetic = expected(loss, loss_tile)
        # The logit scale and bias, 4 bytes each, are no parameters of a tower.
        assert given["all_reduce"] / STEPS == pytest.approx(by_arithmetic["all_reduce"], abs=8)
        # A gather is counted with what it brings, of both ranks.
        assert given.get("all_gather", 0) / STEPS == pytest.approx(2 * by_arithmetic["all_gather"], abs=200)
        assert given.get("send", 0) / STEPS == pytest.approx(by_arithmetic["shift"], abs=8)
