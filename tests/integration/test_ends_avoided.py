"""The same faults as in the other files `test_ends_*`, in runs with `[recovery]`: they go on.

One short test for each row of the table; the matrix, which compares weights, is in `test_ends_recovery`.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support import open_mpi_4
from tests.support.ends import SHORT, begin, full, losses, restarts, write_job
from tests.support.two_nodes import begin_on_two_nodes, run_on_two_nodes


@pytest.mark.fault("rank raises", goes_on=True)
@pytest.mark.fault("rank leaves with a code and no reason", goes_on=True)
@pytest.mark.fault("rank SIGSTOPped or stuck, rank 0 too", goes_on=True)
@pytest.mark.fault("out of memory on one rank, by a limit", goes_on=True)
@pytest.mark.fault("loader stalls; loader worker killed", goes_on=True)
def test_one_run_goes_on_after_five_kinds_of_faults_in_turn(tmp_path: Path) -> None:
    """Each comes in a generation of its own; after the last one some batches are ready, so it shows later."""
    faults = [
        "raise:1:step:3:1",
        "exit:0:step:5:2",
        "stop:0:step:7:3",
        "memory:1:step:9:4",
        "worker-kill:1:step:11:5",
    ]
    running = begin(
        tmp_path,
        "torch",
        "clipship",
        ",".join(faults),
        steps=30,
        data={"workers": 1},
        recovery={"max_restarts": 5, "backoff_s": 0.0},
    )
    end = running.all_end()
    found = restarts(end.folder)
    assert [(each["rank"], each["step"]) for each in found[:4]] == [(1, 3), (0, 5), (0, 7), (1, 9)]
    begins = (
        "ValueError: ",
        "exited with code 7 in step",
        "stopped by a signal",
        "out of memory",
        "a loader ",
    )
    for each, begin_of_cause in zip(found, begins, strict=True):
        assert each["cause"].startswith(begin_of_cause), each
    assert list(losses(end.folder)) == list(range(1, 31))


@pytest.mark.parametrize(
    ("fault", "limits", "kind"),
    [
        pytest.param(
            "orphan:0:step:3:1",
            {},
            "lost",
            id="coordinator's node",
            marks=pytest.mark.fault("node lost, the coordinator's too", goes_on=True),
        ),
        pytest.param(
            "freeze:1:step:3:1",
            {"timeouts": {"silence_s": 8.0}},
            "lost",
            id="silence",
            marks=pytest.mark.fault("node frozen or cut off, rank 0's too", goes_on=True),
        ),
        pytest.param(
            "freeze:1:step:3:1",
            {"then": SHORT},
            "fault",
            id="passed limit",
            marks=pytest.mark.fault("node gone when a limit passes, rank 0's too", goes_on=True),
        ),
    ],
)
def test_other_node_goes_on_alone(tmp_path: Path, fault: str, limits: dict[str, Any], kind: str) -> None:
    recovery = {"max_restarts": 3, "min_nodes": 1}
    path = write_job(tmp_path, "torch", "clipship", fault, recovery=recovery, **limits)
    processes = begin_on_two_nodes(path, 1)
    victim = int(fault.split(":")[1])
    try:
        _, said = processes[1 - victim].communicate(timeout=280)
    finally:
        for process in processes:
            process.kill()  # one that is frozen, too
            process.communicate()
    assert processes[1 - victim].returncode == 0, said
    folder = tmp_path / "runs" / "ends"
    (restart,) = restarts(folder)
    assert (restart["kind"], restart["rank"], restart["ranks"]) == (kind, victim, 1)
    assert list(losses(folder)) == list(range(1, 7))


@pytest.mark.fault("node computes wrong sums, found by the preflight", goes_on=True)
@pytest.mark.parametrize(
    ("later", "found"),
    [
        pytest.param("", [], id="first start"),
        pytest.param(
            ",kill:0:step:3:2,wrong:1:preflight:0:3",
            [("fault", "a", 2, 2), ("unfit", "c", 1, 2)],
            id="restart, too",
            marks=full,
        ),
    ],
)
def test_node_that_computes_wrong_sums_is_replaced(tmp_path: Path, later: str, found: list[object]) -> None:
    """The spare node takes its place. Later there is no other spare, so one rank goes on alone."""
    recovery = {"max_restarts": 3, "min_nodes": 1, "backoff_s": 0.0}
    faults = f"wrong:1:preflight:0:1{later}"
    path = write_job(tmp_path, "torch", "clipship", faults, recovery=recovery)
    ends = run_on_two_nodes(path, each=1, spares=1)
    assert [code for code, _ in ends] == [0, 0, 0], ends
    folder = tmp_path / "runs" / "ends"
    rows = [(each["kind"], each["node"], each["ranks"], each["from_step"]) for each in restarts(folder)]
    assert rows == [("unfit", "b", 2, 0), *found]
    assert "start again from the beginning; without node b: it has failed the preflight\n" in ends[0][1]
    assert list(losses(folder)) == list(range(1, 7))


@pytest.mark.fault("each end under Open MPI 4", goes_on=True)
@open_mpi_4.needed
@open_mpi_4.backends
@pytest.mark.parametrize("fault", ["kill:1:step:3:1", pytest.param("orphan:0:step:3:1", marks=full)])
def test_open_mpi_4_is_started_again(tmp_path: Path, backend: str, fault: str) -> None:
    python = open_mpi_4.python(horovod=backend == "horovod")
    end = begin(tmp_path, backend, "mpirun", fault, python=python, recovery={"max_restarts": 3}).all_end()
    assert len(restarts(end.folder)) == 1
    assert list(losses(end.folder)) == list(range(1, 7))
