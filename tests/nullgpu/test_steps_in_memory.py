"""A step leaves the GPU for the node's memory beside the next one: the host waits for nothing in a step."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.jobs import RESNET, VIT
from tests.support.null_gpu import WARM_STEPS, Steps
from tests.support.training import run, setup_of
from trainer.checkpoint.memory_keeper import MemoryKeeper
from trainer.checkpoint.memory_layout import named_tensors
from trainer.checkpoint.memory_state import kept_steps
from trainer.comm.protocol import Comm

LAST = WARM_STEPS + 5


@pytest.mark.parametrize(("config", "precision"), [(VIT, "bf16"), (VIT, "fp16"), (RESNET, "bf16")])
def test_keeping_a_step_waits_for_nothing_and_copies_into_pinned_memory(
    tmp_path: Path, gpu: Comm, config: str, precision: str
) -> None:
    """Batch norm's statistics and the scaler's factor among what is copied."""
    setup = setup_of(
        tmp_path / "run",
        gpu,
        dict,
        model={"name": config, "precision": precision},
        optim={"steps": LAST + 1},
        eval={"zero_shot": (), "retrieval": ()},
        logging={"every_steps": 2},
    )
    (tmp_path / "memory").mkdir()
    failures: list[str] = []
    keeper = MemoryKeeper(tmp_path / "memory", "start", setup.train_step, 0, 1, failed=failures.append)
    with Steps(WARM_STEPS, LAST) as steps:
        run(replace(setup, keeper=keeper))
    assert failures == []
    steps.check()
    tensors = len(named_tensors(setup.train_step))
    assert steps.seen["d2h_pinned"] >= 4 * tensors, (
        "each of the five steps is kept; the last may be under way"
    )
    kept = kept_steps(tmp_path / "memory", "start")
    assert [each.step for each in kept] == [LAST + 1, LAST]
    assert kept[0].about["record"]["step"] == LAST + 1
