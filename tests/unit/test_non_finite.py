"""The samples of a gradient that is no number are recorded by every rank before one of them ends the run."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.thread_ranks import run_ranks
from trainer.config.recovery import Health
from trainer.train.monitors import NonFinite, NonFiniteGuard
from trainer.train.step import StepResult

NAN = StepResult(torch.tensor(float("nan")), torch.tensor(float("nan")))


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
            NonFiniteGuard(health, tmp_path, comm).check(3, NAN, ["a"])
        return sorted(path.name for path in (tmp_path / "non-finite").glob("step-*"))

    names = [f"step-00000003-rank-{rank:05d}.json" for rank in (0, 1)]
    assert run_ranks(2, names_at_the_end) == [names, names]
