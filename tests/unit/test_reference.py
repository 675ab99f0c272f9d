"""The written reference is that of the code: job file, JSON Schema, command line."""

import json
import tomllib
from typing import Any

import jsonschema
import pytest

from trainer.cli.reference import PLAIN_NUMBERS, ROOT, UNITS, description, files, job_schema, unit
from trainer.config import Job, Section
from trainer.config.keys import walk
from trainer.presets.files import SCHEMA, preset_names, preset_text, schema_line

KEYS = [".".join(key) for key, _ in walk(Job)]
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


def test_the_committed_reference_is_the_codes() -> None:
    stale = [
        path.name
        for path, text in files().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run `make reference` and commit what it writes"


def test_every_key_has_a_description() -> None:
    missing = [key for key in KEYS if not description(tuple(key.split(".")))]
    assert not missing, "write a docstring below each of these keys in trainer/config/"


def test_every_number_has_a_unit_or_is_known_to_have_none() -> None:
    numbers = [
        key for key in KEYS if '"properties"' not in str(schema_of(key)) and _is_number(schema_of(key))
    ]
    missing = [key for key in numbers if unit(key) is None and key not in PLAIN_NUMBERS]
    assert not missing, "name their units in trainer/cli/reference.py"
    assert set(KEYS) >= PLAIN_NUMBERS
    assert all(any(key.endswith(ending) for key in KEYS) for ending in UNITS)


def _is_number(place: dict[str, Any]) -> bool:
    kinds = [part.get("type") for part in place.get("anyOf", [place])]
    return bool(kinds) and all(kind in ("integer", "number") for kind in kinds)


def test_the_schema_says_type_default_range_unit_and_more() -> None:
    seconds = schema_of("timeouts.step_s")
    assert (seconds["type"], seconds["x-unit"], seconds["default"]) == ("number", "seconds", 300.0)
    assert (seconds["exclusiveMinimum"], seconds["maximum"]) == (0, 7 * 86400)
    assert seconds["x-resumed-run-may-change"]
    assert schema_of("optim.loss")["enum"] == ["clip", "siglip", "coca"]
    assert not schema_of("optim.lr")["x-resumed-run-may-change"]
    assert schema_of("data.index")["x-path"] == "folder"
    assert schema_of("comm.nccl.debug")["description"] == description(("comm", "nccl", "debug"))


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


def test_sections_and_keys_of_every_scheduler_are_described() -> None:
    assert issubclass(Job, Section)
    assert {"slurm", "slurm.partition", "kubernetes", "kubernetes.namespace"} <= set(KEYS)
