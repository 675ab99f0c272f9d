"""A rank that is late: after the phase's limit the run ends with exit code 124.

The message names the rank, its phase and its step.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.support.ends import LATEST_S, SHORT, STARTS, begin

SOME = {  # every value but the checkpoint once
    ("torch", "clipship", 0, "step", "stop"),
    ("horovod", "mpirun", 1, "evaluation", "slow"),
}


def cases() -> Iterator[object]:
    """Every start, place and deed; those that are not among SOME only with `-m full`."""
    for start, victim, (phase, step), deed in product(
        STARTS, [0, 1], [("step", 3), ("evaluation", 2), ("checkpoint", 2)], ["stop", "slow"]
    ):
        backend, launcher = start.values
        marks = [
            *start.marks,
            *([] if (backend, launcher, victim, phase, deed) in SOME else [pytest.mark.full]),
        ]
        yield pytest.param(
            backend,
            launcher,
            victim,
            phase,
            step,
            deed,
            marks=marks,
            id=f"{start.id}-{deed}-{victim}-{phase}",
        )


@pytest.mark.fault("rank SIGSTOPped or stuck, rank 0 too")
@pytest.mark.parametrize(("backend", "launcher", "victim", "phase", "step", "deed"), list(cases()))
def test_late_rank_is_named_and_the_run_ends_with_124(
    tmp_path: Path, backend: str, launcher: str, victim: int, phase: str, step: int, deed: str
) -> None:
    end = begin(tmp_path, backend, launcher, f"{deed}:{victim}:{phase}:{step}", then=SHORT).all_end(124)
    found = end.diagnosis
    assert found["late"] == [victim], end.errors
    late = next(report for report in found["ranks"] if report["rank"] == victim)
    assert (late["phase"], late["step"]) == (phase, step)
    assert ("stopped" in late["state"]) == (deed == "stop")
    assert ("in commit" in late["stack"]) == (deed == "slow"), late["stack"]
    last = end.errors[end.errors.rindex("timed out: ") :]
    assert f"late: rank {victim} on " in last
    assert f"in {phase}, step {step}" in last
    assert end.seconds < SHORT[phase] + LATEST_S
