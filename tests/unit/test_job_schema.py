"""The JSON Schema of the job file: an editor with it takes and refuses what the loader does."""

import json
import tomllib
from typing import Any

import jsonschema
import pytest

from tools.reference import ROOT, description, job_schema
from trainer.presets.files import SCHEMA, preset_names, preset_text, schema_line

JOB = {"name": "n", "data": {"format": "synthetic"}, "optim": {"global_batch_size": 8, "steps": 1}}


def schema_of(key: str) -> dict[str, Any]:
    """Returns the schema's entry for a dotted key."""
    place = job_schema()
    for name in key.split("."):
        place = place["properties"][name]
    return place


def problems(job: dict[str, Any]) -> list[str]:
    """Returns the errors that an editor would underline."""
    job = json.loads(json.dumps(job))
    return [error.message for error in jsonschema.Draft7Validator(job_schema()).iter_errors(job)]


def test_the_schema_says_type_default_range_unit_and_more() -> None:
    seconds = schema_of("timeouts.step_s")
    assert (seconds["type"], seconds["x-unit"], seconds["default"]) == ("number", "seconds", 300.0)
    assert (seconds["exclusiveMinimum"], seconds["maximum"]) == (0, 7 * 86400)
    assert seconds["x-resumed-run-may-change"]
    assert schema_of("optim.loss")["enum"] == ["clip", "siglip", "coca"]
    assert not schema_of("optim.lr")["x-resumed-run-may-change"]
    assert schema_of("data.index")["x-path"] == "folder"
    assert schema_of("comm.nccl.ib_hca")["description"] == description(("comm", "nccl", "ib_hca"))


@pytest.mark.parametrize("name", preset_names())
def test_the_schema_takes_what_init_writes(name: str) -> None:
    assert not problems(tomllib.loads(schema_line() + preset_text(name)))


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


def test_the_schema_is_where_the_first_line_says() -> None:
    assert schema_line() == f"#:schema {SCHEMA.as_uri()}\n"
    assert SCHEMA.is_file()
    assert (ROOT / "docs" / "job-schema.json").samefile(SCHEMA)
