"""A run that is done and is started again: left alone, or asked back to one of its checkpoints."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import tiny_job
from trainer.comm.protocol import Comm
from trainer.errors import InputError
from trainer.train.main import prepare, train


@pytest.fixture(autouse=True)
def signal_as_before() -> Iterator[None]:
    """Undoes after the test what a rank does with its signal."""
    on_stop = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, on_stop)


def start(folder: Path, comm: Comm, resume: str = "auto") -> int | None:
    """One start of a run of four steps that saves each; the step it begins at, None where the run is done."""
    job = tiny_job(
        logging={"runs": str(folder), "tensorboard": False},
        health={"preflight": False},
        checkpoint={"every_steps": 1, "resume": resume},
    )
    setup = prepare(job, comm)
    if setup is None:
        return None
    assert not setup.run.result.exists(), "it is not done any more"
    train(setup)
    return setup.start.steps_done


def test_a_run_that_is_done_goes_back_once_to_the_checkpoint_it_is_asked_for(
    tmp_path: Path, alone: Comm
) -> None:
    checkpoints = tmp_path / "tiny" / "checkpoints"
    older = str(checkpoints / "step-00000002")
    assert start(tmp_path, alone) == 0
    assert start(tmp_path, alone) is None
    assert start(tmp_path, alone, older) == 2
    assert {"aside-step-00000003", "aside-step-00000004", "step-00000004"} <= {
        path.name for path in checkpoints.iterdir()
    }
    for resume in (older, "auto"):  # the job that was queued again, and any later one
        assert start(tmp_path, alone, resume) is None
    assert json.loads((tmp_path / "tiny" / "result.json").read_text())["steps"] == 4


def test_a_run_that_is_done_stays_so_where_the_checkpoint_is_refused(tmp_path: Path, alone: Comm) -> None:
    assert start(tmp_path, alone) == 0
    broken = tmp_path / "tiny" / "checkpoints" / "step-00000003"
    (broken / "manifest.json").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        start(tmp_path, alone, str(broken))
    assert start(tmp_path, alone) is None
