"""Communication between real ranks, on every pair of backend and launcher.

The tests look at the result of each collective and at the trainer's gradient.
"""

import json
import os
import re
import subprocess
from typing import Any

import pytest

from tests.parity import BOUND
from tests.support.start import STARTS, start
from trainer.comm.torch_backend import LAZY, MESH_RANKS, connect_when_needed

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
CASES_OF_PARITY = 21


def start_of(backend: str, launcher: str) -> Any:
    """The pair, with the marks of what it needs."""
    return pytest.param(
        backend,
        launcher,
        marks=[pytest.mark.horovod] * (backend == "horovod") + [pytest.mark.mpi] * (launcher == "mpirun"),
    )


PARITY = [(start_of("torch", "clipship"), 4, 0), (start_of("torch", "mpirun"), 2, 1)]
PARITY += [(start_of("horovod", "mpirun"), 2, 0), (start_of("horovod", "clipship"), 2, 1)]
PARITY += [(start_of("fsdp", "clipship"), 2, 0)]
"""Each backend, launcher and world, which `make parity` crosses; 1 for what `make test` leaves out."""
every_start = pytest.mark.parametrize(("backend", "launcher"), [start_of(*pair) for pair in STARTS])
one_start_a_backend = pytest.mark.parametrize(
    ("backend", "launcher"), [start_of("torch", "clipship"), start_of("horovod", "mpirun")]
)


def assert_passed(done: "subprocess.CompletedProcess[str]", ranks: int, cases: tuple[str, ...]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"passed (\w+) on (\d+) ranks", done.stdout) == [(case, str(ranks)) for case in cases]


@every_start
def test_two_ranks_agree_on_values_gradients_and_replicas(backend: str, launcher: str) -> None:
    assert_passed(start(backend, launcher, 2, "tests.support.rank_cases", backend, *IN_ORDER), 2, IN_ORDER)


def test_three_ranks_that_connect_when_they_first_talk_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAZY, "1")
    cases = (*OF_THE_WORLDS_SIZE, "replicas")
    assert_passed(start("torch", "clipship", 3, "tests.support.rank_cases", "torch", *cases), 3, cases)


def test_large_worlds_connect_when_needed_unless_the_variable_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LAZY, "")  # it is restored, since what the test sets below is not monkeypatch's
    monkeypatch.delenv(LAZY)
    connect_when_needed(MESH_RANKS)
    assert LAZY not in os.environ
    connect_when_needed(MESH_RANKS + 1)
    assert os.environ[LAZY] == "1"
    monkeypatch.setenv(LAZY, "0")
    connect_when_needed(10_000)
    assert os.environ[LAZY] == "0"


@pytest.mark.full
@one_start_a_backend
def test_three_ranks_agree_on_values_and_gradients(backend: str, launcher: str) -> None:
    assert_passed(
        start(backend, launcher, 3, "tests.support.rank_cases", backend, *OF_THE_WORLDS_SIZE),
        3,
        OF_THE_WORLDS_SIZE,
    )


@one_start_a_backend
def test_a_parameter_that_only_some_ranks_use_is_averaged_over_all(backend: str, launcher: str) -> None:
    assert_passed(
        start(backend, launcher, 2, "tests.support.rank_cases", backend, "unused_parameters"),
        2,
        ("unused_parameters",),
    )


@one_start_a_backend
def test_a_barrier_stops_waiting_for_a_late_rank(backend: str, launcher: str) -> None:
    """The ranks then leave a broken group, for which launchers have exit codes of their own."""
    done = start(backend, launcher, 2, "tests.support.rank_cases", backend, "barrier_times_out")
    assert "rank 1 stopped waiting" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("backend", "launcher", "ranks"),
    [
        pytest.param(*pair.values, ranks, marks=[*pair.marks, *[pytest.mark.full] * often])
        for pair, ranks, often in PARITY
    ],
)
def test_ranks_have_the_gradient_of_one_process_with_the_whole_batch(
    backend: str, launcher: str, ranks: int
) -> None:
    """A slice of `make parity`: every loss, accumulation and model there."""
    done = start(backend, launcher, ranks, "tests.support.parity_rank", backend)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(found) for found in re.findall(r'\{"ranks".*\}', done.stdout)]
    assert len(rows) == CASES_OF_PARITY
    assert [row for row in rows if not row["relative_error"] <= BOUND] == []
