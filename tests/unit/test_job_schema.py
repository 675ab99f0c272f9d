"""The JSON Schema of the job file: an editor with it takes and refuses what the loader does."""

import json
from typing import Any

import jsonschema
import pytest

from tools.reference import job_schema

JOB = {"name": "n", "data": {"format": "synthetic"}, "optim": {"global_batch_size": 8, "steps": 1}}


def problems(job: dict[str, Any]) -> list[str]:
    """Returns the errors that an editor would underline."""
    job = json.loads(json.dumps(job))
    return [error.message for error in jsonschema.Draft7Validator(job_schema()).iter_errors(job)]


@pytest.mark.parametrize(
    "more",
    [
        {"data": {"train": "shards/{0..9}.tar"}},
        {"data": {"train": ["a.tar", "b.tar"], "crop_scale": [0.5, 1.0]}},
        {"eval": {"zero_shot": "a.tar", "class_names": ["cat"]}},
        {"slurm": {"time": 90, "extra": {"licenses": "a:1", "overcommit": True}}},
        {"env": {"A_1": "x"}, "kubernetes": {"env": {"K": "secret:a:b"}, "patch": {"worker": {"spec": {}}}}},
    ],
    ids=str,
)
def test_the_schema_takes_shorthands_that_the_loader_takes(more: dict[str, Any]) -> None:
    assert not problems(JOB | more)


@pytest.mark.parametrize(
    "more",
    [
        {"sed": 1},
        {"seed": "1"},
        {"seed": -1},
        {"optim": {"steps": 1}},
        {"comm": {"backend": "mpi"}},
        {"env": {"1": "x"}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_loader_refuses(more: dict[str, Any]) -> None:
    assert problems(JOB | more)
