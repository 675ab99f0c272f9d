"""How a global batch and a model are divided among ranks, and with how many a job can go on."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_line import TINY, joined, problems, tiny, with_file
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
NODES = {"nodes": 3, "gpus_per_node": 4}
THREE = {"max_restarts": 3, "min_nodes": 3}


@pytest.mark.parametrize(
    ("ranks", "sections", "said"),
    [
        (8, {"optim": {"global_batch_size": 4096}}, ""),
        (8, {"optim": {"global_batch_size": 100}}, "100 cannot be shared equally by 8 ranks: use 96 or 104"),
        (8, {"optim": {"global_batch_size": 100}}, "one of these numbers of ranks: 2, 4, 5, 10"),
        (2, {"comm": STATIC}, ""),
        (2, {"comm": STATIC, "optim": LIMITED}, "with 2 ranks each step has 2 passes: leave static_graph"),
        (2, {"model": GRAPHS}, ""),
        (2, {"model": GRAPHS, "optim": LIMITED}, "but with 2 ranks each step has 2: leave cuda_graphs out"),
        (4, {"comm": {"backend": "fsdp", "find_unused_parameters": True}}, "unused_parameters = true is not"),
        (4, {"comm": {"backend": "torch", "find_unused_parameters": True}}, ""),
        (4, {"comm": {"backend": "fsdp", "fsdp": {"shard_degree": 3}}}, "degree = 3 does not divide 4 ranks"),
        (4, {"comm": {"backend": "torch", "fsdp": {"shard_degree": 3}}}, ""),
        (4, {"comm": {"backend": "fsdp"}, "model": GRAPHS}, "cuda_graphs = true is not possible with comm.b"),
        (4, {"comm": {"backend": "torch"}, "model": GRAPHS}, ""),
        (None, {"recovery": {"spare_nodes": 2}}, "spare_nodes = 2 needs max_restarts above 0"),
        (None, {"recovery": {"min_nodes": 1}}, "min_nodes = 1 needs max_restarts above 0"),
        (None, {"optim": {"global_batch_size": 24}, "recovery": {"max_restarts": 3, "min_nodes": 1}}, ""),
        (None, {"optim": {"global_batch_size": 24}, "recovery": THREE}, ""),
        (
            None,
            {"optim": {"global_batch_size": 24}, "recovery": {"max_restarts": 3, "min_nodes": 4}},
            "recovery.min_nodes = 4 is above resources.nodes = 3: use at most 3",
        ),
        (
            None,
            {"optim": {"global_batch_size": 12}, "recovery": {"max_restarts": 3, "min_nodes": 2}},
            "min_nodes = 2: 8 ranks cannot share optim.global_batch_size = 12 equally: use 1 or 3",
        ),
        (
            None,
            {"recovery": THREE, "optim": {"global_batch_size": 96}}
            | {"stage": [{"optim": {"global_batch_size": 64}}]},
            "12 ranks cannot share optim.global_batch_size = 64 of stage 2 equally: use 1 or 2",
        ),
        (
            None,
            {"recovery": THREE, "optim": {"global_batch_size": 96}}
            | {"comm": {"backend": "fsdp", "fsdp": {"shard_degree": 8}}},
            "12 ranks cannot be cut into groups of comm.fsdp.shard_degree = 8: use 2",
        ),
        (
            None,
            {"recovery": THREE, "optim": {"global_batch_size": 96, "max_batch_size_per_gpu": 1}}
            | {"comm": STATIC},
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


def test_epochs_become_whole_steps_and_less_than_one_is_refused(tmp_path: Path) -> None:
    short = joined(TINY, data={"synthetic_samples": 31}, optim={"global_batch_size": 32})
    said = with_file(["check"], joined(short, logging={"runs": str(tmp_path)}))
    assert "31 samples, fewer than optim.global_batch_size = 32: give more data" in said.err
    for optim, steps in (({"steps": None, "epochs": 3}, 6), ({"steps": 1000}, 1000)):
        found = tiny(data={"synthetic_samples": 70}, optim={"global_batch_size": 32, **optim})
        assert (found["steps"], found["accumulation"]) == (steps, 1)


SPLIT = {"backend": "fsdp", "fsdp": {"shard_degree": 4}}


@pytest.mark.parametrize(
    ("sections", "sizes", "even"),
    [
        ({"optim": {"global_batch_size": 24}}, [1, 2, 3, 4, 6, 8, 12, 24], False),
        # Fewer ranks would have to accumulate.
        (
            {"optim": {"global_batch_size": 24, "max_batch_size_per_gpu": 6}, "comm": STATIC},
            [4, 6, 8, 12, 24],
            False,
        ),
        # Six ranks cannot share 64 samples.
        (
            {"optim": {"global_batch_size": 96}, "stage": ({"optim": {"global_batch_size": 64}},)},
            [1, 2, 4, 8, 16, 32],
            False,
        ),
        ({"optim": {"global_batch_size": 24}, "comm": SPLIT}, [1, 4, 8, 12, 24], False),
        ({"optim": {"global_batch_size": 6}, "comm": SPLIT | {"backend": "torch"}}, [1, 2, 3, 6], False),
        # Each node holds a copy of the model.
        ({"comm": {"backend": "fsdp", "fsdp": {"shard_degree": "node"}}}, [1, 2, 4, 8, 16], True),
        ({"comm": {"backend": "torch", "fsdp": {"shard_degree": "node"}}}, [1, 2, 4, 8, 16], False),
        ({"comm": {"backend": "fsdp"}}, [1, 2, 4, 8, 16], False),
    ],
)
def test_a_supervisor_is_told_with_how_many_ranks_a_run_can_go_on(
    tmp_path: Path, sections: dict[str, Any], sizes: list[int], even: bool
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(dump_job(tiny_job(**sections)))
    found = limits_of_job([str(path)])
    assert (found["world_sizes"], found["even_nodes"]) == (sizes, even)


@pytest.mark.parametrize(
    ("setting", "nodes", "expected"),
    [
        ("world", "aabb", 4),
        ("world", "aab", 3),
        ("node", "aabb", 2),
        ("node", "abcd", 1),
        (2, "aaaa", 2),
        (4, "aabb", 4),
        (1, "aabb", 1),
        ("auto", "aabb", 4),
        ("auto", "a" * 8 + "b" * 8, 8),
        ("auto", "a" * 8 + "b" * 7, 15),
        ("node", "aab", "the same number of ranks on each node"),
        ("node", "abab", "one node after the other, but the 4 ranks are on a, b, a, b"),
        (3, "aabb", "comm.fsdp.shard_degree = 3 does not divide 4 ranks"),
        (8, "aabb", "does not divide 4 ranks"),
    ],
)
def test_a_model_is_split_among_consecutive_ranks(setting: Any, nodes: str, expected: int | str) -> None:
    if isinstance(expected, int):
        assert shard_degree(setting, list(nodes)) == expected
        return
    with pytest.raises(InputError, match=expected):
        shard_degree(setting, list(nodes))
