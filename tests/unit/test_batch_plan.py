"""Batch plans: a global batch divided among ranks and micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.jobs import tiny_job
from trainer.config import Job
from trainer.config.batch_plan import plan, schedule
from trainer.errors import InputError


def _job(global_batch: int, limit: int | None = None, **length: int) -> Job:
    optim = {"global_batch_size": global_batch, "max_batch_size_per_gpu": limit, **(length or {"steps": 1})}
    return Job.model_validate({"name": "n", "data": {"train": ("x.tar",)}, "optim": optim})


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 100))
def test_micro_batches_are_equal_and_within_the_limit(ranks: int, per_rank: int, limit: int) -> None:
    batch_plan = plan(_job(ranks * per_rank, limit), ranks)
    assert (
        batch_plan.micro_batch_size * batch_plan.accumulation * batch_plan.world_size
        == batch_plan.global_batch_size
        == ranks * per_rank
    )
    assert 1 <= batch_plan.micro_batch_size <= limit


@given(st.integers(1, 64), st.integers(1, 100))
def test_micro_batches_are_no_smaller_than_they_must_be(per_rank: int, limit: int) -> None:
    batch_plan = plan(_job(per_rank, limit), 1)
    coarser = [k for k in range(1, batch_plan.accumulation) if per_rank % k == 0]
    assert all(per_rank // k > limit for k in coarser)


def test_without_a_limit_nothing_is_accumulated() -> None:
    assert plan(_job(4096), 8).accumulation == 1


def test_a_world_that_does_not_divide_the_batch_is_refused_with_what_fits() -> None:
    with pytest.raises(
        InputError, match=r"100 cannot be shared equally by 8 ranks: use 96 or 104.*2, 4, 5, 10"
    ):
        plan(_job(100), 8)


def test_a_static_graph_is_refused_where_passes_are_accumulated() -> None:
    job = tiny_job(optim={"global_batch_size": 16}, comm={"torch": {"static_graph": True}})
    assert plan(job, 2).accumulation == 1
    limited = tiny_job(
        optim={"global_batch_size": 16, "max_batch_size_per_gpu": 4}, comm={"torch": {"static_graph": True}}
    )
    with pytest.raises(InputError, match=r"static_graph = true .* with 2 ranks each step has 2 passes"):
        plan(limited, 2)


def test_cuda_graphs_are_refused_where_passes_are_accumulated() -> None:
    graphs = {"cuda_graphs": True}
    assert plan(tiny_job(optim={"global_batch_size": 16}, model=graphs), 2).accumulation == 1
    limited = tiny_job(optim={"global_batch_size": 16, "max_batch_size_per_gpu": 4}, model=graphs)
    with pytest.raises(InputError, match=r"cuda_graphs = true .* with 2 ranks each step has 2: "):
        plan(limited, 2)


def test_epochs_become_whole_steps() -> None:
    assert schedule(_job(32, epochs=3), 100).steps == 9


def test_steps_take_precedence_over_epochs() -> None:
    assert schedule(_job(32, steps=1000), 100) == schedule(_job(32, steps=1000), 127)


def test_fewer_samples_than_a_global_batch_are_refused() -> None:
    with pytest.raises(InputError, match=r"31 samples, fewer than optim.global_batch_size = 32"):
        schedule(_job(32), 31)
