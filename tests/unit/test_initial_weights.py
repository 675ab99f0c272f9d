"""Models without initial weights, for ranks that go on: equal to the others once a state is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.jobs import tiny_job
from trainer.checkpoint.resume import expects_state
from trainer.comm.protocol import Comm


@pytest.mark.parametrize(
    ("resume", "on_disk", "generation", "in_memory", "expected"),
    [
        ("auto", False, 1, True, False),
        ("auto", True, 1, True, True),
        ("never", True, 1, True, False),
        ("/a/checkpoint", False, 1, True, True),
        ("auto", False, 2, True, True),
        ("auto", False, 2, False, False),
        ("never", True, 2, False, True),
    ],
)
def test_state_is_expected_of_a_checkpoint_or_of_the_ranks_before(
    resume: str,
    on_disk: bool,
    generation: int,
    in_memory: bool,
    expected: bool,
    tmp_path: Path,
    alone: Comm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    its = tiny_job(checkpoint={"resume": resume}, recovery={"max_restarts": 3, "keep_in_memory": in_memory})
    if on_disk:
        checkpoint = tmp_path / "checkpoints" / "step-00000003"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    monkeypatch.setattr(alone, "world", replace(alone.world, generation=generation))
    assert expects_state(its, alone, tmp_path / "checkpoints") is expected
