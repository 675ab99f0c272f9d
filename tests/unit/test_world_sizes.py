"""Numbers of ranks with which a job can go on, and keys of `[recovery]` that leave none."""

from typing import Any

import pytest

from tests.support.jobs import tiny_job
from tests.support.refusals import refusal
from trainer.config import Job
from trainer.config.world_sizes import check_nodes, world_sizes
from trainer.errors import InputError


def job(batch: int = 24, **recovery: Any) -> Job:
    return tiny_job(
        optim={"global_batch_size": batch},
        resources={"nodes": 3, "gpus_per_node": 4},
        recovery={"max_restarts": 3, **recovery},
    )


def test_world_sizes_divide_the_batch() -> None:
    assert world_sizes(job()) == [1, 2, 3, 4, 6, 8, 12, 24]


def test_world_sizes_leave_out_those_that_the_backend_refuses() -> None:
    static = tiny_job(
        optim={"global_batch_size": 24, "max_batch_size_per_gpu": 6}, comm={"torch": {"static_graph": True}}
    )
    assert world_sizes(static) == [4, 6, 8, 12, 24], "fewer ranks would have to accumulate"


@pytest.mark.parametrize("fewest", [None, 1, 2, 3])
def test_nodes_that_can_share_the_batch_pass(fewest: int | None) -> None:
    assert refusal(check_nodes, job(min_nodes=fewest)) == ""


@pytest.mark.parametrize(
    ("batch", "fewest", "reason"),
    [
        (24, 4, "recovery.min_nodes = 4 is above resources.nodes = 3: use at most 3"),
        (
            12,
            2,
            "recovery.min_nodes = 2: 8 ranks cannot share optim.global_batch_size = 12 equally: use 1 or 3",
        ),
    ],
)
def test_fewest_nodes_that_cannot_be_are_named_with_the_number(batch: int, fewest: int, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        check_nodes(job(batch, min_nodes=fewest))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"spare_nodes": 2}, "spare_nodes = 2 needs max_restarts above 0"),
        ({"min_nodes": 1}, "min_nodes = 1 needs max_restarts above 0"),
    ],
)
def test_keys_that_need_restarts_are_refused_without(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tiny_job(recovery=keys)
