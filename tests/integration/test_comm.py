"""Communication between real ranks, on every pair of backend and launcher.

The tests look at the result of each collective and at the trainer's gradient.
"""

import os
from typing import Any

import pytest

from tests.parity import BOUND
from tests.support.start import STARTS, start, told
from trainer.comm.torch_backend import connect_when_needed

LAZY = "TORCH_GLOO_LAZY_INIT"
IN_ORDER = (
    "collectives",
    "objects",
    "gradients_through_collectives",
    "batch_norm",
    "reducer_averages",
    "buckets_average",
    "fixed_reducer_averages",
    "fixed_reducer_needs_every_gradient",
    "replicas",
    "states_of_optimizers",
)
"""Cases of `rank_cases` that leave the group as they found it, so that one start serves all of them."""
OF_THE_WORLDS_SIZE = ("collectives", "objects", "gradients_through_collectives", "batch_norm")
CASES_OF_PARITY, EVERY = 21, 3
"""Backends share losses and accumulation: on all but torch, every third case is tried."""


def start_of(backend: str, launcher: str, *words: int, full: bool = False) -> Any:
    """The pair, with the marks of what it needs."""
    marks = [pytest.mark.horovod] * (backend == "horovod") + [pytest.mark.mpi] * (launcher == "mpirun")
    return pytest.param(backend, launcher, *words, marks=[*marks, *[pytest.mark.full] * full])


ONE_A_BACKEND = (("torch", "clipship"), ("horovod", "mpirun"))
one_start_a_backend = pytest.mark.parametrize(
    ("backend", "launcher"), [start_of(*pair) for pair in ONE_A_BACKEND]
)


def assert_pass(backend: str, launcher: str, ranks: int, cases: tuple[str, ...]) -> None:
    """Runs these cases of `rank_cases`, which all must pass."""
    found = told(backend, launcher, ranks, "tests.support.rank_cases", backend, *cases)
    assert found == [[case, ranks] for case in cases]


@pytest.mark.parametrize(
    ("backend", "launcher"), [start_of(*pair, full=pair not in ONE_A_BACKEND) for pair in STARTS]
)
def test_two_ranks_agree_on_values_gradients_and_replicas(backend: str, launcher: str) -> None:
    assert_pass(backend, launcher, 2, IN_ORDER)


def test_three_ranks_that_connect_when_they_first_talk_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAZY, "1")
    assert_pass("torch", "clipship", 3, (*OF_THE_WORLDS_SIZE, "replicas"))


def test_large_worlds_connect_when_needed_unless_the_variable_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LAZY, "")  # it is restored, since what the test sets below is not monkeypatch's
    monkeypatch.delenv(LAZY)
    connect_when_needed(64)
    assert LAZY not in os.environ
    connect_when_needed(65)
    assert os.environ[LAZY] == "1"
    monkeypatch.setenv(LAZY, "0")
    connect_when_needed(10_000)
    assert os.environ[LAZY] == "0"


@pytest.mark.full
@one_start_a_backend
def test_three_ranks_agree_on_values_and_gradients(backend: str, launcher: str) -> None:
    assert_pass(backend, launcher, 3, OF_THE_WORLDS_SIZE)


@one_start_a_backend
def test_a_parameter_that_only_some_ranks_use_is_averaged_and_a_barrier_stops_waiting_for_a_late_rank(
    backend: str, launcher: str
) -> None:
    """The ranks then leave a broken group, for which launchers have exit codes of their own."""
    cases = ("unused_parameters", "barrier_times_out")
    done = start(backend, launcher, 2, "tests.support.rank_cases", backend, *cases)
    assert 'told: ["unused_parameters", 2]' in done.stdout, done.stdout + done.stderr
    assert "rank 1 stopped waiting" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("backend", "launcher", "ranks"),
    [
        start_of("torch", "clipship", 4),
        start_of("torch", "mpirun", 2, full=True),
        start_of("horovod", "clipship", 2),
        start_of("horovod", "mpirun", 2, full=True),
        start_of("fsdp", "clipship", 2),
    ],
)
def test_ranks_have_the_gradient_of_one_process_with_the_whole_batch(
    backend: str, launcher: str, ranks: int
) -> None:
    """A slice of `make parity`, which crosses all of them: every loss, accumulation and model there."""
    every = 1 if backend == "torch" else EVERY
    rows = told(backend, launcher, ranks, "tests.support.parity_rank", backend, str(every))
    assert len(rows) == CASES_OF_PARITY // every
    assert [row for row in rows if not row["relative_error"] <= BOUND] == []
