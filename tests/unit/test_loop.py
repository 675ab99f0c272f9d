"""The training loop's order of things: what is saved before what, and which checkpoint is the best. One rank, a few steps."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.checkpoint import files
from trainer.checkpoint.writer import Writer
from trainer.comm.protocol import Comm
from trainer.config.batch_plan import plan, schedule
from trainer.data.source import open_source
from trainer.errors import InputError, Preempted
from trainer.model.build import build_model
from trainer.model.optimizer import build_optimizer
from trainer.run.layout import Run
from trainer.train.loop import Loop, Metrics
from trainer.train.requests import Requests
from trainer.train.step import TrainStep

STEPS = 4


@pytest.fixture(autouse=True)
def stop_signal() -> Iterator[None]:
    """What a loop does on a request to stop ends with the test."""
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


def loop_of(folder: Path, comm: Comm, evaluate: Callable[[], Metrics], **sections: dict[str, Any]) -> Loop:
    """A run of four steps in the folder, whose evaluations are `evaluate`."""
    sections["eval"] = {"zero_shot": ("val",), "retrieval": ("val.csv",), **sections.get("eval", {})}
    job = tiny_job(**sections, logging={"tensorboard": False})  # type: ignore[arg-type]
    batch_plan, source, run = plan(job, 1), open_source(job.data), Run(folder)
    clip = build_model(job, batch_plan, comm)
    train = TrainStep(job, batch_plan, comm, clip.model, build_optimizer(clip.model, job.optim, comm.device))
    writer = Writer(run.checkpoints, job.checkpoint, 0, 1, 30.0)
    requests = Requests(folder, 0, comm.heartbeat)
    return Loop(
        job,
        comm,
        run,
        batch_plan,
        schedule(job, len(source)),
        clip,
        train,
        source,
        None,
        evaluate,
        writer,
        requests,
    )


def saved(loop: Loop) -> list[int]:
    """The steps whose checkpoints are there."""
    return sorted(
        int(folder.name.removeprefix("step-")) for folder in files.newest_first(loop.run_folder.checkpoints)
    )


def test_the_best_of_another_metric_is_no_measure(tmp_path: Path, alone: Comm) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    files.note_best(tmp_path / "checkpoints", 1, "zero_shot_top1", 0.6)
    loop = loop_of(
        tmp_path, alone, lambda: {"retrieval_i2t_r1": 0.35}, checkpoint={"best": "retrieval_i2t_r1"}
    )
    assert loop.run(STEPS - 1) == {"retrieval_i2t_r1": 0.35}
    assert files.best_so_far(loop.run_folder.checkpoints) == {
        "step": STEPS,
        "metric": "retrieval_i2t_r1",
        "value": 0.35,
    }


def fails() -> Metrics:
    raise InputError("eval.zero_shot: a sample that cannot be used")


def gives_up() -> Metrics:
    raise Preempted("asked to stop")


def manifest(loop: Loop, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (loop.run_folder.checkpoints / files.folder_name(step) / files.MANIFEST).read_text()
    )
    return found


def evaluations(loop: Loop) -> list[int]:
    """The steps of which metrics.jsonl says what was measured."""
    events = [json.loads(line) for line in loop.run_folder.metrics.read_text().splitlines()]
    return [event["step"] for event in events if "zero_shot_top1" in event]


def test_the_end_of_a_run_is_on_disk_before_an_evaluation_that_fails(tmp_path: Path, alone: Comm) -> None:
    loop = loop_of(tmp_path, alone, fails)
    with pytest.raises(InputError, match="a sample that cannot be used"):
        loop.run(0)
    assert saved(loop) == [STEPS]


def test_a_start_at_the_last_step_evaluates_only_and_the_best_is_noted(tmp_path: Path, alone: Comm) -> None:
    with pytest.raises(InputError):
        loop_of(tmp_path, alone, fails).run(0)
    again = loop_of(tmp_path, alone, lambda: {"zero_shot_top1": 0.5}, checkpoint={"best": "zero_shot_top1"})
    assert again.run(STEPS) == {"zero_shot_top1": 0.5}
    assert files.best_so_far(again.run_folder.checkpoints) == {
        "step": STEPS,
        "metric": "zero_shot_top1",
        "value": 0.5,
    }
    assert (manifest(again, STEPS)["metrics"], evaluations(again)) == ({"zero_shot_top1": 0.5}, [STEPS])
    files.verified(again.run_folder.checkpoints / files.folder_name(STEPS))


@pytest.mark.parametrize("every_steps", [2, 3])
def test_the_best_is_the_step_that_was_measured_whether_it_was_due_or_not(
    tmp_path: Path, alone: Comm, every_steps: int
) -> None:
    """Of four steps the second is the best and is due by itself; or is saved only because it is the best."""
    values = iter([0.1, 0.9, 0.3, 0.2])
    settings = {"best": "zero_shot_top1", "every_steps": every_steps, "keep": 1}
    loop = loop_of(
        tmp_path,
        alone,
        lambda: {"zero_shot_top1": next(values)},
        checkpoint=settings,
        eval={"every_steps": 1},
    )
    assert loop.run(0) == {"zero_shot_top1": 0.2}
    assert saved(loop) == [2, 4]
    assert files.best_so_far(loop.run_folder.checkpoints) == {
        "step": 2,
        "metric": "zero_shot_top1",
        "value": 0.9,
    }
    assert [manifest(loop, step)["metrics"]["zero_shot_top1"] for step in (2, 4)] == [0.9, 0.2]


def test_a_request_to_stop_leaves_the_evaluation_out_and_saves(tmp_path: Path, alone: Comm) -> None:
    measured: list[Metrics] = []

    def once() -> Metrics:
        """The request comes while the first step is evaluated, so that all hear of it at the third: rank 0 tells it at the second."""
        signal.raise_signal(signal.SIGUSR2)
        measured.append({"zero_shot_top1": 0.5})
        return measured[-1]

    loop = loop_of(tmp_path, alone, once, eval={"every_steps": 1}, optim={"steps": 9})
    with pytest.raises(Preempted, match="asked to stop: step 3 of 9 is saved"):
        loop.run(0)
    assert (saved(loop), evaluations(loop)) == ([3], [1, 2])


def test_an_evaluation_that_is_given_up_leaves_its_step_saved(tmp_path: Path, alone: Comm) -> None:
    loop = loop_of(tmp_path, alone, gives_up, eval={"every_steps": 2})
    with pytest.raises(Preempted, match="asked to stop: step 2 of 4 is saved"):
        loop.run(0)
    assert saved(loop) == [2]
    with pytest.raises(Preempted, match="asked to stop: step 4 of 4 is saved"):
        loop_of(tmp_path, alone, gives_up).run(2)
    assert saved(loop) == [2, 4]


def test_a_last_checkpoint_that_cannot_be_written_stops_the_run(
    tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for evaluate, number in ((dict, 0), (gives_up, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        loop = loop_of(folder, alone, evaluate)
        with monkeypatch.context() as patch:
            patch.setattr("torch.save", disk_full)
            with pytest.raises(OSError, match="No space left"):
                loop.run(0)
