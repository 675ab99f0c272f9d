"""A gradient that is not finite on a GPU: found out there, read a step later, as the job asked."""

import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.null_gpu import Steps
from tests.support.training import run, setup_of
from tools import nullgpu
from trainer.checkpoint.memory_keeper import MemoryKeeper
from trainer.comm.protocol import Comm
from trainer.train.monitors import NonFinite

STEPS = 6


@pytest.fixture
def reads_nan() -> Iterator[None]:
    """Every value that the host reads is NaN, the norm of the gradient among them."""
    nullgpu.reads(as_float=math.nan)
    yield
    nullgpu.reads(as_float=0.0)


def sections(**health: Any) -> dict[str, Any]:
    return {
        "health": health,
        "optim": {"steps": STEPS},
        "eval": {"zero_shot": (), "retrieval": ()},
        "logging": {"every_steps": 1},
    }


@pytest.mark.usefixtures("reads_nan")
def test_the_run_stops_when_the_next_step_is_under_way_and_leaves_the_samples(
    tmp_path: Path, gpu: Comm
) -> None:
    with Steps(1, 2) as steps, pytest.raises(NonFinite, match="the gradient of step 1 is NaN or infinite"):
        run(setup_of(tmp_path, gpu, dict, **sections()))
    assert steps.done == 2
    assert steps.seen.waits == [], steps.seen.table()
    (samples,) = (tmp_path / "non-finite").iterdir()
    about = json.loads(samples.read_text())
    assert (about["step"], len(about["keys"])) == (1, 16)
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.usefixtures("reads_nan")
def test_no_checkpoint_of_a_step_is_begun_before_its_gradient_is_known(tmp_path: Path, gpu: Comm) -> None:
    with pytest.raises(NonFinite, match="step 1 "):
        run(setup_of(tmp_path, gpu, dict, **sections(), checkpoint={"every_steps": 1}))
    assert not list(tmp_path.glob("checkpoints/*"))


class Keeper:
    """Takes the place of what keeps steps in memory, and remembers what it is given."""

    own_need = 0.0

    def __init__(self) -> None:
        self.records: list[Future[Mapping[str, object]]] = []

    def keep(self, _step: int, record: Future[Mapping[str, object]], *_skipped: object) -> None:
        self.records.append(record)

    def receive(self, _total: float, _ranks: int) -> None:
        """Does nothing."""


@pytest.mark.usefixtures("reads_nan")
@pytest.mark.parametrize("every_steps", [1, 100])
def test_a_step_in_memory_is_complete_only_when_its_gradient_is_known(
    tmp_path: Path, gpu: Comm, every_steps: int
) -> None:
    keeper = Keeper()
    job = {**sections(non_finite="skip", non_finite_in_a_row=3), "logging": {"every_steps": every_steps}}
    setup = replace(setup_of(tmp_path, gpu, dict, **job), keeper=cast(MemoryKeeper, keeper))
    with pytest.raises(NonFinite, match="step 3 "):
        run(setup)
    assert [record.done() for record in keeper.records] == [True, True, False]


@pytest.mark.usefixtures("reads_nan")
def test_steps_that_are_skipped_are_counted_without_a_wait(tmp_path: Path, gpu: Comm) -> None:
    job = sections(non_finite="skip", non_finite_in_a_row=4)
    with (
        Steps(3, 5) as steps,
        pytest.raises(NonFinite, match=r"step 4 .*like every gradient of the last 4 steps"),
    ):
        run(setup_of(tmp_path, gpu, dict, **job))
    assert steps.done == 5
    assert steps.seen.waits == [], steps.seen.table()
    records = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records == [1, 2, 3]
    assert sorted(path.name[:13] for path in (tmp_path / "non-finite").iterdir()) == [
        f"step-{step:08d}" for step in (1, 2, 3, 4)
    ]
