"""Among how many ranks the parameters are split."""

from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.comm.backends import keeps_in_memory
from trainer.comm.shard_degree import shard_degree
from trainer.errors import InputError
from trainer.plan.check import check_without_files
from trainer.plan.state_memory import in_memory, too_little_memory


@pytest.mark.parametrize(
    ("setting", "nodes", "expected"),
    [
        ("world", "aabb", 4),
        ("world", "aab", 3),
        ("node", "aabb", 2),
        ("node", "aaaa", 4),
        ("node", "abcd", 1),
        (2, "aaaa", 2),
        (4, "aabb", 4),
        (1, "aabb", 1),
        ("auto", "aabb", 4),
        ("auto", "a" * 8, 8),
        ("auto", "a" * 8 + "b" * 8, 8),
        ("auto", "a" * 8 + "b" * 7, 15),
    ],
)
def test_ranks_are_cut_into_groups_of_consecutive_ones(setting: Any, nodes: str, expected: int) -> None:
    assert shard_degree(setting, list(nodes)) == expected


@pytest.mark.parametrize(
    ("setting", "nodes", "said"),
    [
        ("node", "aab", "the same number of ranks on each node"),
        ("node", "abab", "one node after the other, but the 4 ranks are on a, b, a, b"),
        (3, "aabb", "comm.fsdp.shard_degree = 3 does not divide 4 ranks"),
        (8, "aabb", "does not divide 4 ranks"),
    ],
)
def test_ranks_that_cannot_be_cut_so_are_refused(setting: Any, nodes: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        shard_degree(setting, list(nodes))


@pytest.mark.parametrize(
    ("comm", "model", "said"),
    [
        ({"find_unused_parameters": True}, {}, "find_unused_parameters = true is not possible"),
        ({"fsdp": {"shard_degree": 3}}, {}, "shard_degree = 3 does not divide 4 ranks"),
        ({}, {"cuda_graphs": True}, "cuda_graphs = true is not possible with comm.backend = fsdp"),
    ],
)
def test_check_refuses_what_the_ranks_would(comm: dict[str, Any], model: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_without_files(tiny_job(comm={"backend": "fsdp", **comm}, model=model), 4)
    check_without_files(tiny_job(comm={"backend": "torch", **comm}, model=model), 4)


def test_restarts_of_split_ranks_begin_at_a_checkpoint_and_check_says_so() -> None:
    whole = tiny_job(recovery={"max_restarts": 3})
    split = tiny_job(recovery={"max_restarts": 3}, comm={"backend": "fsdp"})
    assert keeps_in_memory(whole)
    assert not keeps_in_memory(split)
    assert list(in_memory(split)) == [
        "with comm.backend = fsdp no step is kept in memory: restarts go on from the newest checkpoint"
    ]
    assert list(too_little_memory(split, local=True)) == []
    check_without_files(split, 4)
