"""Trainings on pictures of many shapes, on real ranks: losses of one process, also after a resume."""

from pathlib import Path

import pytest

from tests.support.naflex_rank import CASES, CUT, STEPS
from tests.support.start import told

full, horovod = pytest.mark.full, pytest.mark.horovod


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        pytest.param("torch", 1, marks=full),
        pytest.param("torch", 2, marks=full),
        pytest.param("torch", 4, marks=full),
        pytest.param("fsdp", 2),
        pytest.param("fsdp", 4, marks=full),
        pytest.param("horovod", 1, marks=[horovod, full]),
        pytest.param("horovod", 2, marks=[horovod, full]),
        pytest.param("horovod", 4, marks=[horovod, full]),
    ],
)
def test_ranks_have_the_losses_of_one_process_also_after_a_resume_in_the_middle_of_an_epoch(
    tmp_path: Path, backend: str, ranks: int
) -> None:
    rows = told(backend, "clipship", ranks, "tests.support.naflex_rank", str(tmp_path), backend)
    assert [row["case"] for row in rows] == list(CASES)
    for row in rows:
        assert len(row["one"]) == STEPS
        assert row["whole"] == pytest.approx(row["one"], rel=1e-10), row["case"]
        assert row["before"] + row["after"] == pytest.approx(row["whole"], rel=1e-12), row["case"]
        assert len(row["before"]) == CUT
