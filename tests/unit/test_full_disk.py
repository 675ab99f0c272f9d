"""A run goes on, and says so, if there is no room for a file beside its result.

In these tests a file stands where the folder would be. Every rank has recorded the samples of a gradient that
is no number before one of them ends the run.
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.jobs import VIT, tiny_job
from tests.support.steps import untrained
from tests.support.thread_ranks import run_ranks
from trainer.comm.protocol import Comm
from trainer.config.recovery import Health
from trainer.evaluate.evaluation import Evaluation
from trainer.telemetry.profiler import Profiler
from trainer.train.monitors import NonFinite, NonFiniteGuard
from trainer.train.step import StepResult

LEFT_OUT = StepResult(torch.tensor(float("nan")), torch.tensor(float("nan")))


@pytest.fixture
def no_folder(tmp_path: Path) -> Path:
    """Nothing can be made in it."""
    (tmp_path / "file").touch()
    return tmp_path / "file"


def test_samples_that_cannot_be_recorded_are_left_out_all_the_same(
    no_folder: Path, alone: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    NonFiniteGuard(Health(non_finite="skip"), no_folder, alone).check(3, LEFT_OUT, ["a"])
    assert "the samples of step 3 are NOT WRITTEN: " in caplog.text
    with pytest.raises(NonFinite, match=r"Its samples are not recorded \(.*Not a directory"):
        NonFiniteGuard(Health(), no_folder, alone).check(3, LEFT_OUT, ["a"])


def test_a_trace_that_cannot_be_written_is_not_begun(
    no_folder: Path, alone: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = Profiler((1, 3), no_folder, alone)
    for step in (1, 2, 3):
        profiler.begin(step)
        profiler.end(step)
    assert caplog.text.count("NOT WRITTEN") == 1


def test_an_evaluation_whose_board_cannot_be_written_has_its_metrics(
    tmp_path: Path, no_folder: Path, alone: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        Image.new("RGB", (40, 40)).save(tmp_path / f"{name}.png")
    (tmp_path / "t.csv").write_text("image,caption\na.png,one\nb.png,two\n")
    job = tiny_job(config=VIT, eval={"retrieval": (str(tmp_path / "t.csv"),), "batch_size": 2})
    with caplog.at_level(logging.WARNING):
        metrics = Evaluation(job, alone, no_folder)(untrained(job))
    assert "retrieval_t2i_r1" in metrics
    assert "the retrieval board is NOT WRITTEN: " in caplog.text


@pytest.mark.parametrize(
    "health", [Health(), Health(non_finite="skip", non_finite_in_a_row=1)], ids=["stop", "in a row"]
)
def test_no_rank_leaves_before_a_late_one_has_recorded_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, health: Health
) -> None:
    def write_late(path: Path, about: dict[str, Any]) -> None:
        time.sleep(0.2 * about["rank"])
        path.write_text(json.dumps(about))

    monkeypatch.setattr("trainer.train.monitors.write_json", write_late)

    def names_at_the_end(comm: Any) -> list[str]:
        with pytest.raises(NonFinite, match="the gradient of step 3 is NaN"):
            NonFiniteGuard(health, tmp_path, comm).check(3, LEFT_OUT, ["a"])
        return sorted(path.name for path in (tmp_path / "non-finite").glob("step-*"))

    names = [f"step-00000003-rank-{rank:05d}.json" for rank in (0, 1)]
    assert run_ranks(2, names_at_the_end) == [names, names]
