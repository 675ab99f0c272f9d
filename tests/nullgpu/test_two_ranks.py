"""Two ranks with NCCL's stand-in: DDP, FSDP and the gathers make the host wait for nothing either."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import RESNET, VIT, tiny_job
from tests.support.start import told
from trainer.config import Model
from trainer.config.batch_plan import plan
from trainer.estimate.architecture import architecture
from trainer.estimate.scaling import collectives

STEPS = 4
"""Steps that a rank watches; every second one is logged, with a small gather of its own."""
CASES: dict[str, dict[str, Any]] = {
    "clip": {"optim": {}},
    "siglip": {"optim": {"loss": "siglip"}},
    "micro-batches": {"optim": {"max_batch_size_per_gpu": 4}},
    "CUDA graphs": {"optim": {}, "model": {"cuda_graphs": True}},
}
BATCH_NORM: dict[str, dict[str, Any]] = {"batch norm": {"model": {"name": RESNET}}}
"""A ResNet, whose batch norm takes its statistics over both ranks."""

Given = dict[tuple[str, int], dict[str, int]]
"""Bytes by kind of collective, of a case and a rank."""


def trained(folder: Any, backend: str, cases: dict[str, dict[str, Any]]) -> Given:
    """Trains all cases in one start of two ranks, each of which checks that it waits for nothing."""
    words = (str(folder), backend, json.dumps(cases))
    found = told(backend, "clipship", 2, "tests.support.null_gpu_rank", *words)
    return {(name, rank): given for name, rank, given in found}


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NULLGPU_DEVICES", "2")
        yield


@pytest.fixture(scope="module")
def torch_given(two_gpus: None, tmp_path_factory: pytest.TempPathFactory) -> Given:
    return trained(tmp_path_factory.mktemp("torch"), "torch", CASES | BATCH_NORM)


@pytest.fixture(scope="module")
def fsdp_given(two_gpus: None, tmp_path_factory: pytest.TempPathFactory) -> Given:
    cases = {name: CASES[name] for name in ("clip", "micro-batches")}
    return trained(tmp_path_factory.mktemp("fsdp"), "fsdp", cases)


def expected(case: str, backend: str) -> Counter[str]:
    """Bytes that a rank gives to each kind of collective in a step, as `estimate/scaling.py` reckons them."""
    keys = CASES[case]
    shape, job = architecture(Model(name=VIT)), tiny_job(optim=keys["optim"], model={"precision": "bf16"})
    assert shape is not None
    given = Counter[str]()
    for one in collectives(shape, job, plan(job, 2), backend, 2**20):
        given[one.what] += int(one.nbytes)
    return given


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_no_rank_waits_once_ddp_has_timed_its_first_steps_and_bytes_are_as_reckoned(
    torch_given: Given, case: str, rank: int
) -> None:
    given, reckoned = torch_given[case, rank], expected(case, "torch")
    # The logit scale and bias, 4 bytes each, are no parameters of a tower.
    assert given["all_reduce"] / STEPS == pytest.approx(reckoned["all_reduce"], abs=8)
    # A gather is counted with what it brings, of both ranks.
    assert given.get("all_gather", 0) / STEPS == pytest.approx(2 * reckoned["all_gather"], abs=200)
    assert given.get("reduce_scatter", 0) / STEPS == reckoned["reduce_scatter"]


def test_batch_norm_over_two_ranks_makes_none_wait(torch_given: Given) -> None:
    for rank in (0, 1):
        assert torch_given["batch norm", rank]["all_gather"] > 0


def test_sums_in_a_fixed_order_make_none_wait(tmp_path: Path) -> None:
    given = trained(tmp_path, "torch", {"fixed sums": {"comm": {"deterministic": True}}})
    assert all(given["fixed sums", rank]["all_reduce"] > 0 for rank in (0, 1))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", ["clip", "micro-batches"])
def test_no_rank_that_splits_the_model_waits_and_bytes_are_as_reckoned(
    fsdp_given: Given, case: str, rank: int
) -> None:
    given, reckoned = fsdp_given[case, rank], expected(case, "fsdp")
    print(given, reckoned)
    assert given["reduce_scatter"] / STEPS == pytest.approx(reckoned["reduce_scatter"], rel=0.02)
    assert given["all_gather"] / STEPS == pytest.approx(2 * reckoned["all_gather"], rel=0.02)
