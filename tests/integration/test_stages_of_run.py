"""A run of two stages whose ranks are killed in the second: they go on there, from memory, on any backend."""

from pathlib import Path

import pytest

from tests.integration.test_ends_recovery import evaluations, same, start
from tests.support.ends import End, losses

STAGE = {"name": "larger", "model": {"image_size": 48}, "optim": {"steps": 5, "global_batch_size": 8}}


@pytest.mark.parametrize(
    "backend",
    ["torch", pytest.param("horovod", marks=pytest.mark.full), pytest.param("fsdp", marks=pytest.mark.full)],
)
def test_ranks_that_are_killed_in_a_stage_go_on_in_it_with_the_same_bits(
    tmp_path: Path, backend: str
) -> None:
    def run(name: str, fault: str = "") -> End:
        return start(tmp_path / name, fault, backend, steps=4, stage=(STAGE,), deterministic=True)

    whole = run("whole")
    end = run("faulty", "kill:1:step:7:1")
    assert "start        step 4, from the weights of the stage before" in whole.output
    assert list(losses(end.folder)) == list(range(1, 10))
    assert evaluations(end.folder) == [2, 4, 6, 8, 9]
    assert "all ranks go on from step 6" in end.errors
    assert same(whole, end, step=9)
