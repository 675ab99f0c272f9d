"""The backend fsdp on real ranks: the same training as one process, and the same checkpoints as torch."""

from pathlib import Path

import pytest
import torch

from tests.support.fsdp_rank import SAMPLES, STEPS, job_of
from tests.support.jobs import tiny_job
from tests.support.start import told
from tests.support.steps import step_of
from trainer.checkpoint.identity import RunIdentity
from trainer.checkpoint.resume import restore
from trainer.comm.torch_backend import TorchBackend
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World


def passed(folder: Path, ranks: int, degree: int, *words: str) -> None:
    found = told("fsdp", "clipship", ranks, "tests.support.fsdp_rank", str(folder), str(degree), *words)
    assert sorted(found) == [["all cases passed", rank] for rank in range(ranks)]


def test_two_ranks_train_as_one_process_and_one_process_resumes_them(tmp_path: Path) -> None:
    passed(tmp_path, 2, 2)
    world = World(0, 1, 0, 1, "here", "test")
    alone = TorchBackend(tiny_job(), world, torch.device("cpu"), Heartbeat.open({}))
    job = job_of({"backend": "torch"}, 2)
    train = step_of(job, alone, on_host=True)
    assert restore(job, alone, tmp_path / "fsdp", train, RunIdentity(job, SAMPLES)).steps_done == STEPS
    assert {int(state["step"]) for state in train.optimizer.state.values()} == {STEPS}
    alone.close()


def test_two_groups_of_two_ranks_hold_a_copy_each_and_train_as_one_process(tmp_path: Path) -> None:
    passed(tmp_path, 4, 2, "steps")


@pytest.mark.full
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_four_ranks_hold_the_model_once_twice_or_four_times(tmp_path: Path, degree: int) -> None:
    passed(tmp_path, 4, degree)
