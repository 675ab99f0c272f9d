"""The training loop's order, on one rank: what is saved before what, which checkpoint is the best."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import training
from tests.support.training import TrainSetup, run, setup_of
from trainer.checkpoint import files
from trainer.checkpoint.memory_keeper import MemoryKeeper
from trainer.checkpoint.memory_state import kept_steps
from trainer.comm.protocol import Comm
from trainer.errors import InputError, Preempted
from trainer.evaluate.rounds import EvaluationFailed
from trainer.train.loop import LateReads
from trainer.train.main import train

STEPS = 4


@pytest.fixture(autouse=True)
def stop_signal() -> Iterator[None]:
    """Puts the handler back that a loop replaces to receive a request to stop."""
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


def saved(setup: TrainSetup) -> list[int]:
    """The steps whose checkpoints are there."""
    return sorted(
        int(folder.name.removeprefix("step-")) for folder in files.newest_first(setup.run.checkpoints)
    )


def test_the_best_value_of_another_metric_is_not_compared(tmp_path: Path, alone: Comm) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    files.record_best(tmp_path / "checkpoints", 1, "zero_shot_top1", 0.6)
    other = "retrieval_i2t_r1"
    setup = setup_of(tmp_path, alone, lambda: {other: 0.35}, STEPS - 1, checkpoint={"best": other})
    assert run(setup).metrics == {other: 0.35}
    assert files.best_so_far(setup.run.checkpoints) == {"step": STEPS, "metric": other, "value": 0.35}


def fails() -> dict[str, float]:
    raise InputError("eval.zero_shot: a sample that cannot be used")


def gives_up() -> dict[str, float]:
    raise Preempted("asked to stop")


def manifest(setup: TrainSetup, step: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        (setup.run.checkpoints / f"step-{step:08d}" / files.MANIFEST).read_text()
    )
    return content


def evaluations(setup: TrainSetup, name: str = "zero_shot_top1") -> list[int]:
    """Steps of the lines of metrics.jsonl that have a value of this name."""
    events = [json.loads(line) for line in setup.run.metrics.read_text().splitlines()]
    return [event["step"] for event in events if name in event]


WHY = "bad samples: 40 of 100 (40 damaged image)"


def fails_together() -> dict[str, float]:
    raise EvaluationFailed(WHY)


def test_an_evaluation_that_fails_does_not_end_the_run(
    tmp_path: Path, alone: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    setup = setup_of(tmp_path, alone, fails_together, eval={"every_steps": 2})
    train(setup)
    assert saved(setup) == [2, STEPS]
    result = json.loads(setup.run.result.read_text())
    assert (result["exit_code"], result["evaluation_failed"]) == (0, WHY)
    assert f"step 2 is NOT EVALUATED, and the run goes on: {WHY}" in caplog.text
    assert evaluations(setup) == []


def test_an_evaluation_that_fails_ends_the_run_with_its_step_saved_if_the_job_says_so(
    tmp_path: Path, alone: Comm
) -> None:
    setup = setup_of(tmp_path, alone, fails_together, eval={"every_steps": 2, "on_failure": "stop"})
    with pytest.raises(EvaluationFailed, match="40 of 100"):
        train(setup)
    assert saved(setup) == [2]


def test_an_evaluation_that_ends_well_after_one_that_failed_leaves_no_failure(
    tmp_path: Path, alone: Comm
) -> None:
    outcomes: Iterator[Any] = iter([fails_together, lambda: {"zero_shot_top1": 0.5}])
    result = run(setup_of(tmp_path, alone, lambda: next(outcomes)(), eval={"every_steps": 2}))
    assert (result.evaluation_failed, result.metrics) == (None, {"zero_shot_top1": 0.5})


@pytest.mark.parametrize("every_steps", [2, 3])
def test_the_best_is_the_step_that_was_measured_whether_it_was_due_or_not(
    tmp_path: Path, alone: Comm, every_steps: int
) -> None:
    """The second of four steps is the best. It is saved because it is due, or only because it is the best."""
    values = iter([0.1, 0.9, 0.3, 0.2])
    settings = {"best": "zero_shot_top1", "every_steps": every_steps, "keep": 1}
    setup = setup_of(
        tmp_path,
        alone,
        lambda: {"zero_shot_top1": next(values)},
        checkpoint=settings,
        eval={"every_steps": 1},
    )
    assert run(setup).metrics == {"zero_shot_top1": 0.2}
    assert saved(setup) == [2, 4]
    assert files.best_so_far(setup.run.checkpoints) == {"step": 2, "metric": "zero_shot_top1", "value": 0.9}
    assert [manifest(setup, step)["metrics"]["zero_shot_top1"] for step in (2, 4)] == [0.9, 0.2]


def test_a_request_to_stop_leaves_the_evaluation_out_and_saves(tmp_path: Path, alone: Comm) -> None:
    measured: list[dict[str, float]] = []

    def once() -> dict[str, float]:
        """The request comes while the first step is evaluated.

        Rank 0 sends it at the second step, so that all ranks receive it at the third.
        """
        signal.raise_signal(signal.SIGUSR2)
        measured.append({"zero_shot_top1": 0.5})
        return measured[-1]

    setup = setup_of(tmp_path, alone, once, eval={"every_steps": 1}, optim={"steps": 9})
    with pytest.raises(Preempted, match="asked to stop: step 3 of 9 is saved"):
        train(setup)
    assert (saved(setup), evaluations(setup)) == ([1, 3], [1, 2])
    assert not setup.run.result.exists(), "the run is not done"


def test_an_evaluation_that_is_given_up_leaves_its_step_saved_and_waited_for(
    tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[tuple[str, int]] = []
    monkeypatch.setattr(alone.heartbeat, "begin_phase", lambda phase, step=0: phases.append((phase, step)))
    setup = setup_of(tmp_path, alone, gives_up, eval={"every_steps": 2})
    stopped = run(setup)
    assert (stopped.stopped, stopped.steps, stopped.saved_step, saved(setup)) == (True, STEPS, 2, [2])
    assert phases[-1] == ("checkpoint", 2), f"the supervisors believe that {STEPS} steps are done"


def test_a_last_checkpoint_that_cannot_be_written_stops_the_run(
    tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for evaluate, number in ((dict, 0), (gives_up, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        setup = setup_of(folder, alone, evaluate)
        with monkeypatch.context() as patch:
            patch.setattr("torch.save", disk_full)
            with pytest.raises(OSError, match="No space left"):
                run(setup)


def from_memory(folder: Path, comm: Comm, evaluate: Any, step: int, saved_step: int, **sections: Any) -> Any:
    return training.from_memory(setup_of(folder, comm, evaluate, step, **sections), step, saved_step)


@pytest.mark.parametrize("written", ['{"step": 2, "lo', '{"step": 2, "loss": 1}\n{"step": 3, "loss": 1}\n'])
def test_start_from_memory_writes_a_record_once_and_makes_up_for_checkpoint_and_evaluation(
    tmp_path: Path, alone: Comm, written: str
) -> None:
    """The ranks before ended while they wrote the checkpoint of the step, or evaluated it."""
    keys = {"checkpoint": {"every_steps": 2, "keep": 9}, "eval": {"every_steps": 2}}
    setup = from_memory(tmp_path, alone, lambda: {"zero_shot_top1": 0.5}, 2, 0, **keys)
    setup.run.metrics.write_text('{"step": 1, "loss": 0.5}\n' + written)
    run(setup)
    assert evaluations(setup, "loss") == [1, 2, 3, 4]
    assert (saved(setup), evaluations(setup)) == ([2, 4], [2, 4])
    assert manifest(setup, 2)["metrics"] == {"zero_shot_top1": 0.5}


def test_start_from_memory_saves_at_once_if_a_checkpoint_of_an_earlier_step_was_lost(
    tmp_path: Path, alone: Comm
) -> None:
    setup = from_memory(tmp_path, alone, dict, 3, 0, checkpoint={"every_steps": 2, "keep": 9})
    run(setup)
    assert saved(setup) == [3, 4]


def test_evaluation_that_was_recorded_is_not_made_again(tmp_path: Path, alone: Comm) -> None:
    """Its checkpoint gets the metrics, and may be the best."""
    keys: dict[str, Any] = {
        "checkpoint": {"every_steps": 2, "best": "zero_shot_top1"},
        "eval": {"every_steps": 2},
    }
    before = setup_of(tmp_path, alone, fails, steps_done=1, **keys)
    with pytest.raises(InputError):
        run(before)
    assert saved(before) == [2]
    values = iter([0.5])
    setup = from_memory(tmp_path, alone, lambda: {"zero_shot_top1": next(values)}, 2, 2, **keys)
    event = {"step": 2, "zero_shot_top1": 0.75, "generation": 1}
    setup.run.metrics.write_text(json.dumps(event) + "\n")
    run(setup)
    assert evaluations(setup) == [2, 4]
    assert manifest(setup, 2)["metrics"] == {"zero_shot_top1": 0.75}
    assert files.best_so_far(setup.run.checkpoints) == {"step": 2, "metric": "zero_shot_top1", "value": 0.75}


def test_loop_keeps_each_step_and_says_so_in_the_result(tmp_path: Path, alone: Comm) -> None:
    setup = setup_of(tmp_path, alone, dict)
    (tmp_path / "memory").mkdir()
    keeper = MemoryKeeper(tmp_path / "memory", "start", setup.train_step, 0, 1)
    result = run(replace(setup, keeper=keeper))
    found = kept_steps(tmp_path / "memory", "start")
    assert [kept.step for kept in found] == [STEPS, STEPS - 1]
    assert found[0].about["record"]["step"] == STEPS
    assert result.summary["in_memory"] == {"every_steps": 1, "bytes_per_node": 2 * found[0].layout.size}


@pytest.mark.parametrize("late", [False, True])
def test_on_a_gpu_actions_wait_for_the_next_step_and_keep_their_order(late: bool) -> None:
    """On a CPU they run at once."""
    done: list[int] = []
    reads = LateReads(late=late)
    for number in (1, 2):
        reads.add(partial(done.append, number))
    assert done == ([] if late else [1, 2])
    reads.settle()
    reads.settle()
    assert done == [1, 2]


def test_what_follows_a_step_that_is_not_finite_is_not_written() -> None:
    done: list[int] = []

    def stop() -> None:
        raise ArithmeticError("the gradient of step 3 is NaN or infinite")

    reads = LateReads(late=True)
    reads.add(stop)
    reads.add(lambda: done.append(3))
    with pytest.raises(ArithmeticError):
        reads.settle()
    reads.settle()
    assert done == []
