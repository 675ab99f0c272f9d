"""The anchor pulls trained weights to the first ones as its formula says, and needs one copy of them."""

from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.checkpoint.identity import RunIdentity
from trainer.config import Job

RATE, ANCHOR, STEPS = 0.03, 2.5, 7


def job_of(**optim: Any) -> Job:
    return tiny_job(
        model={"init": "first.pt"},
        optim={"lr": RATE, "anchor": ANCHOR, "weight_decay": 0.0, **optim},
        eval={"mix": 0.25, "retrieval": ("a.csv",)},
    )


def test_an_anchor_without_given_first_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optim\.anchor = 2 pulls trained weights to those .* are random"):
        tiny_job(optim={"anchor": 2.0})


def test_other_first_weights_make_another_run() -> None:
    then = RunIdentity(
        job_of(), 64, anchor={"model.init": "a"}, order={"block_samples": 7, "lanes": 8}
    ).facts()
    assert RunIdentity(job_of(), 64, anchor={"model.init": "a"}).changes(then) == []
    assert RunIdentity(job_of(), 64, anchor={"model.init": "b"}).changes(then) == [
        "model.init has other weights than then, and optim.anchor pulls to them"
    ]
