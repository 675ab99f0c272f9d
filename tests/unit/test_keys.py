"""Every key of the job file says what it is where it is declared.

Paths, mounts and the resume rule follow from the declaration.
"""

from pathlib import Path
from typing import Any

import pytest

from trainer.config import Job, Section
from trainer.config.keys import JobPath, path_of, rank_paths, walk, with_paths_from
from trainer.config.loader import from_here
from trainer.config.resume_rule import may_change_keys
from trainer.errors import InputError

PATHS = {".".join(key): mark for key, field in walk(Job) if (mark := path_of(field))}
EXAMPLES = {
    "model.teacher": "models/teacher.json",
    "model.name": "own.json",
    "model.pretrained": "weights.pt",
    "slurm.image": "./clip.sif",
    "slurm.python": "bin/python",
    "slurm.output": "logs/%j.out",
}
NEEDED = {
    "model.teacher": {"teacher_pretrained": "openai"},
    "model.teacher_pretrained": {"teacher": "ViT-B-32"},
    "slurm.image_dir": {"container": "pyxis"},
    "slurm.container_binary": {"container": "apptainer", "image": "/clip.sif"},
}
"""Values of its section without which a key is refused."""


def job_with(key: str, value: object) -> Job:
    """A job in which this key alone is set, and those that it needs."""
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
    return Job.model_validate(table)


def value_of(section: Section, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = section
    for name in key.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("key", "mark"), PATHS.items())
def test_a_relative_path_starts_at_the_job_files_folder(key: str, mark: JobPath) -> None:
    text = EXAMPLES.get(key, "some/place")
    is_list = isinstance(value_of(job_with("seed", 1), key), tuple) and mark.lists
    job = with_paths_from(job_with(key, (text,) if is_list else text), Path("/base"))
    found = value_of(job, key)
    expected = str(Path("/base", text))
    assert found == ((expected,) if isinstance(found, tuple) else expected)
    assert with_paths_from(job, Path("/other")) == job
    assert (expected in [path for path, _ in rank_paths(job)]) == mark.ranks


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.name", "ViT-B-32"),
        ("model.pretrained", "laion2b_s34b_b79k"),
        ("checkpoint.resume", "never"),
        ("slurm.image", "registry.example/clip:1"),
        ("slurm.python", "python3"),
        ("eval.class_names", ("cat", "dog")),
        ("eval.retrieval", ("s3://bucket/{0..3}.tar",)),
        ("eval.class_names", "s3://bucket/names.txt"),
        ("checkpoint.copy_to", "s3://bucket/runs"),
    ],
)
def test_values_that_are_no_paths_stay_unchanged(key: str, value: object) -> None:
    job = with_paths_from(job_with(key, value), Path("/base"))
    assert value_of(job, key) == value
    assert list(rank_paths(job)) == [("/base/runs", PATHS["logging.runs"])]


@pytest.mark.parametrize("key", ["model.pretrained", "logging.runs", "eval.suite.folders", "data.cache"])
def test_an_address_is_no_path(key: str) -> None:
    is_list = isinstance(value_of(job_with("seed", 1), key), tuple)
    job = job_with(key, ("s3://bucket/some",) if is_list else "s3://bucket/some")
    with pytest.raises(
        InputError, match=rf"^{key}: s3://bucket/some is an address, and this key takes a path"
    ):
        with_paths_from(job, Path("/base"))
    with pytest.raises(InputError, match=rf"^{key}: s3://bucket/some is an address"):
        from_here([f"{key}=s3://bucket/some"])


def test_a_scheduler_that_a_job_does_not_name_stays_unnamed() -> None:
    assert "slurm" not in with_paths_from(job_with("seed", 1), Path("/base")).model_fields_set


def test_keys_that_decide_what_is_computed_may_not_change() -> None:
    """A new section or key is part of the run's identity unless its declaration says otherwise."""
    every = {".".join(key) for key, _ in walk(Job)}
    assert may_change_keys() <= every
    fixed = {
        key for key in every if not any(key == may or key.startswith(f"{may}.") for may in may_change_keys())
    }
    assert {"seed", "data.train", "model.name", "optim.lr", "optim.global_batch_size"} <= fixed
    assert not fixed & {"data.workers", "comm.backend", "slurm.time", "timeouts.step_s", "logging.runs"}
