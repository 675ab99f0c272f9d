"""Every key of the job file says what it is where it is declared.

Paths, mounts and the resume rule follow from the declaration.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.support.command_line import clipship
from trainer.config import Job
from trainer.config.loader import load_job
from trainer.errors import InputError

SCHEMA = json.loads(clipship("explain", "", "--json").out)


def marked(table: dict[str, Any], mark: str, before: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys whose entry in the schema has such a mark, with their entries."""
    for name, its in table["properties"].items():
        if mark in its:
            yield before + name, its
        if "properties" in its:
            yield from marked(its, mark, f"{before}{name}.")


PATHS = dict(marked(SCHEMA, "x-path"))
EXAMPLES = {
    "model.teacher": "models/teacher.json",
    "model.name": "own.json",
    "model.pretrained": "weights.pt",
    "slurm.image": "./clip.sif",
    "slurm.python": "bin/python",
    "slurm.output": "logs/%j.out",
}
NAMES = {"eval.class_names", "eval.templates"}
"""Keys whose lists are no paths."""
NEEDED = {
    "model.teacher": {"teacher_pretrained": "openai"},
    "model.teacher_pretrained": {"teacher": "ViT-B-32"},
    "slurm.image_dir": {"container": "pyxis"},
    "slurm.container_binary": {"container": "apptainer", "image": "/clip.sif"},
}
"""Values of its section without which a key is refused."""


def job_in(folder: Path, key: str, value: object) -> Job:
    """A job file there in which this key alone is set, and those that it needs."""
    table: dict[str, Any] = {
        "name": "n",
        "data": {"format": "synthetic"},
        "optim": {"global_batch_size": 8, "steps": 1},
    }
    if key == "data.train":
        table["data"] = {}
    if key == "model.targets":
        table["data"] = {"train": "/a.tar"}
    *sections, name = key.split(".")
    inner = table
    for section in sections:
        inner = inner.setdefault(section, {})
    inner.update({**NEEDED.get(key, {}), name: value})
    path = folder / "job.toml"
    path.write_text(tomli_w.dumps(table))
    return load_job(path)


def value_of(section: Any, key: str) -> Any:
    """The value of a dotted key."""
    for name in key.split("."):
        section = getattr(section, name)
    return section


@pytest.mark.parametrize("key", PATHS)
def test_a_relative_path_starts_at_the_job_files_folder(key: str, tmp_path: Path) -> None:
    text = EXAMPLES.get(key, "some/place")
    listed = isinstance(value_of(job_in(tmp_path, "seed", 1), key), tuple) and key not in NAMES
    found = value_of(job_in(tmp_path, key, [text] if listed else text), key)
    assert found == ((str(tmp_path / text),) if isinstance(found, tuple) else str(tmp_path / text))


@pytest.mark.parametrize("key", ["model.pretrained", "eval.suite.folders"])
def test_an_address_is_no_path(key: str, tmp_path: Path) -> None:
    listed = isinstance(value_of(job_in(tmp_path, "seed", 1), key), tuple)
    said = rf"{key}: s3://bucket/some is an address, and this key takes a path"
    with pytest.raises(InputError, match=said):
        job_in(tmp_path, key, ["s3://bucket/some"] if listed else "s3://bucket/some")
    job_in(tmp_path, "seed", 1)
    assert (
        f"{key}: s3://bucket/some is an address"
        in clipship("check", tmp_path / "job.toml", "--set", f"{key}=s3://bucket/some").err
    )


def test_keys_that_decide_what_is_computed_may_not_change() -> None:
    """A new section or key is part of the run's identity unless its declaration says otherwise."""
    may = {key for key, its in marked(SCHEMA, "x-resumed-run-may-change") if its["x-resumed-run-may-change"]}
    assert not may & {"seed", "data.train", "model.name", "optim.lr", "optim.global_batch_size"}
    assert {"data.workers", "comm.backend", "slurm.time", "timeouts.step_s", "logging.runs"} <= may
