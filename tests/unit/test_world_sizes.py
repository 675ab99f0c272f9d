"""Numbers of ranks with which a job can go on, and keys of `[recovery]` that leave none."""

from typing import Any

import pytest

from tests.support.jobs import tiny_job
from tests.support.refusals import refusal
from trainer.config import Job
from trainer.config.world_sizes import check_nodes, needs_even_nodes, world_sizes
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


def test_world_sizes_share_the_batch_of_every_stage() -> None:
    staged = tiny_job(optim={"global_batch_size": 96}, stage=({"optim": {"global_batch_size": 64}},))
    assert world_sizes(staged) == [1, 2, 4, 8, 16, 32], "6 ranks cannot share 64 samples"


def test_world_sizes_can_be_cut_as_the_shards_ask() -> None:
    comm = {"backend": "fsdp", "fsdp": {"shard_degree": 4}}
    assert world_sizes(tiny_job(optim={"global_batch_size": 24}, comm=comm)) == [1, 4, 8, 12, 24]
    assert world_sizes(tiny_job(optim={"global_batch_size": 6}, comm={**comm, "backend": "torch"})) == [
        1,
        2,
        3,
        6,
    ]


@pytest.mark.parametrize(
    ("comm", "even"),
    [
        ({"backend": "fsdp", "fsdp": {"shard_degree": "node"}}, True),
        ({"backend": "fsdp"}, False),
        ({"backend": "torch", "fsdp": {"shard_degree": "node"}}, False),
    ],
)
def test_nodes_that_hold_the_model_each_have_as_many_ranks(comm: dict[str, Any], even: bool) -> None:
    assert needs_even_nodes(tiny_job(comm=comm)) is even


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        (
            {"stage": ({"optim": {"global_batch_size": 64}},)},
            "12 ranks cannot share optim.global_batch_size = 64 of stage 2 equally: use 1 or 2",
        ),
        (
            {"comm": {"backend": "fsdp", "fsdp": {"shard_degree": 8}}},
            "12 ranks cannot be cut into groups of comm.fsdp.shard_degree = 8: use 2",
        ),
        (
            {"comm": {"torch": {"static_graph": True}}, "optim": {"max_batch_size_per_gpu": 1}},
            r"12 ranks cannot train \(comm.torch.static_graph = true needs .*\): no number of nodes can",
        ),
    ],
)
def test_fewest_nodes_say_what_their_ranks_cannot_do(sections: dict[str, Any], reason: str) -> None:
    optim = {"global_batch_size": 96, **sections.pop("optim", {})}
    recovery = {"max_restarts": 3, "min_nodes": 3}
    job = tiny_job(optim=optim, resources={"nodes": 3, "gpus_per_node": 4}, recovery=recovery, **sections)
    with pytest.raises(InputError, match=reason):
        check_nodes(job)


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
