"""How a global batch and a model are divided among ranks, and with how many a job can go on."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_line import problems
from tests.support.jobs import tiny_job
from trainer.comm.shard_degree import shard_degree
from trainer.config.batch_plan import plan
from trainer.config.loader import dump_job
from trainer.errors import InputError
from trainer.run.job_limits import limits_of_job


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 100))
def test_micro_batches_are_equal_and_as_large_as_the_limit_lets_them(
    ranks: int, per_rank: int, limit: int
) -> None:
    job = tiny_job(optim={"global_batch_size": ranks * per_rank, "max_batch_size_per_gpu": limit})
    found = plan(job, ranks)
    assert found.micro_batch_size * found.accumulation * found.world_size == ranks * per_rank
    assert 1 <= found.micro_batch_size <= limit
    coarser = [k for k in range(1, found.accumulation) if per_rank % k == 0]
    assert all(per_rank // k > limit for k in coarser)


GRAPHS = {"cuda_graphs": True}
STATIC = {"torch": {"static_graph": True}}
LIMITED = {"global_batch_size": 16, "max_batch_size_per_gpu": 4}
OF_24 = {"optim": {"global_batch_size": 24}}
NODES = {"nodes": 3, "gpus_per_node": 4}
THREE = {"max_restarts": 3, "min_nodes": 3}


@pytest.mark.parametrize(
    ("ranks", "sections", "said"),
    [
        (8, {"optim": {"global_batch_size": 100}}, "100 cannot be shared equally by 8 ranks: use 96 or 104"),
        (8, {"optim": {"global_batch_size": 100}}, "one of these numbers of ranks: 2, 4, 5, 10"),
        (2, {"comm": STATIC, "optim": LIMITED}, "with 2 ranks each step has 2 passes: leave static_graph"),
        (2, {"model": GRAPHS}, ""),
        (2, {"model": GRAPHS, "optim": LIMITED}, "but with 2 ranks each step has 2: leave cuda_graphs out"),
        (4, {"comm": {"backend": "fsdp", "find_unused_parameters": True}}, "unused_parameters = true is not"),
        (4, {"comm": {"backend": "fsdp", "fsdp": {"shard_degree": 3}}}, "degree = 3 does not divide 4 ranks"),
        (4, {"comm": {"backend": "fsdp"}, "model": GRAPHS}, "cuda_graphs = true is not possible with comm.b"),
        (None, {"recovery": {"spare_nodes": 2}}, "spare_nodes = 2 needs max_restarts above 0"),
        (None, {"recovery": {"min_nodes": 1}}, "min_nodes = 1 needs max_restarts above 0"),
        (None, OF_24 | {"recovery": {"max_restarts": 3, "min_nodes": 1}}, ""),
        (
            None,
            OF_24 | {"recovery": {"max_restarts": 3, "min_nodes": 4}},
            "min_nodes = 4 is above resources.n",
        ),
        (
            None,
            {"optim": {"global_batch_size": 12}, "recovery": {"max_restarts": 3, "min_nodes": 2}},
            "min_nodes = 2: 8 ranks cannot share optim.global_batch_size = 12 equally: use 1 or 3",
        ),
        (
            None,
            OF_24 | {"recovery": THREE, "stage": [{"optim": {"global_batch_size": 64}}]},
            "12 ranks cannot share optim.global_batch_size = 64 of stage 2 equally: use 1 or 2",
        ),
        (
            None,
            OF_24 | {"recovery": THREE, "comm": {"backend": "fsdp", "fsdp": {"shard_degree": 8}}},
            "12 ranks cannot be cut into groups of comm.fsdp.shard_degree = 8: use 2",
        ),
        (
            None,
            {"recovery": THREE, "comm": STATIC, "optim": {**LIMITED, "global_batch_size": 96}},
            "12 ranks cannot train (comm.torch.static_graph = true needs a reduction",
        ),
    ],
)
def test_a_batch_and_a_model_that_ranks_cannot_share_are_refused(
    ranks: int | None, sections: dict[str, Any], said: str
) -> None:
    resources = {"gpus_per_node": ranks} if ranks else NODES
    found = problems(resources=resources, slurm={}, **sections)
    assert said in found
    assert bool(said) == bool(found)


@pytest.mark.parametrize(
    ("batch_size", "sections", "sizes", "even"),
    [
        (24, {"optim": {"max_batch_size_per_gpu": 6}}, [1, 2, 3, 4, 6, 8, 12, 24], False),
        (24, {"optim": {"max_batch_size_per_gpu": 6}, "comm": STATIC}, [4, 6, 8, 12, 24], False),
        (96, {"stage": ({"optim": {"global_batch_size": 64}},)}, [1, 2, 4, 8, 16, 32], False),
        (24, {"comm": {"backend": "fsdp", "fsdp": {"shard_degree": 4}}}, [1, 4, 8, 12, 24], False),
        (6, {"comm": {"backend": "torch", "fsdp": {"shard_degree": 4}}}, [1, 2, 3, 6], False),
        (4, {"comm": {"backend": "fsdp", "fsdp": {"shard_degree": "node"}}}, [1, 2, 4], True),
    ],
)
def test_a_supervisor_is_told_with_how_many_ranks_a_run_can_go_on(
    tmp_path: Path, batch_size: int, sections: dict[str, Any], sizes: list[int], even: bool
) -> None:
    optim = {"global_batch_size": batch_size, **sections.pop("optim", {})}
    (tmp_path / "job.toml").write_text(dump_job(tiny_job(optim=optim, **sections)))
    found = limits_of_job([str(tmp_path / "job.toml")])
    assert (found["world_sizes"], found["even_nodes"]) == (sizes, even)


@pytest.mark.parametrize(
    ("setting", "nodes", "expected"),
    [
        ("world", "aabb", 4),
        ("node", "aabb", 2),
        ("node", "abcd", 1),
        (4, "aabb", 4),
        ("auto", "a" * 8 + "b" * 8, 8),
        ("auto", "a" * 8 + "b" * 7, 15),
        ("node", "aab", "the same number of ranks on each node"),
        ("node", "abab", "one node after the other, but the 4 ranks are on a, b, a, b"),
        (3, "aabb", "comm.fsdp.shard_degree = 3 does not divide 4 ranks"),
    ],
)
def test_a_model_is_split_among_consecutive_ranks(setting: Any, nodes: str, expected: int | str) -> None:
    if isinstance(expected, int):
        assert shard_degree(setting, list(nodes)) == expected
        return
    with pytest.raises(InputError, match=expected):
        shard_degree(setting, list(nodes))
