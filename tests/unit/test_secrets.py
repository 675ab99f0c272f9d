"""Secrets of a job stand in no record that others read.

`check` names them, and they are refused where they would enter an image.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from trainer.config.loader import load_job, recorded
from trainer.errors import InputError
from trainer.plan.trained import evaluation_job

SIGNED = "https://data.example/0.tar?X-Amz-Expires=9&X-Amz-Signature=s3cr3t"


def job_file(folder: Path, **sections: Any) -> Path:
    table = {
        "name": "x",
        "data": {"format": "synthetic"},
        "model": {"name": "ViT-S-32-alt"},
        "optim": {"global_batch_size": 32, "steps": 2},
        **sections,
    }
    path = folder / "job.toml"
    path.write_text(tomli_w.dumps(table))
    return path


def test_an_evaluation_does_not_begin_with_an_address_that_lost_its_secret(tmp_path: Path) -> None:
    job = tiny_job(eval={"retrieval": (SIGNED,)})
    (tmp_path / "model.pt").touch()
    (tmp_path / "manifest.json").write_text(json.dumps({"job": recorded(job)}))
    with pytest.raises(InputError, match="had a secret in its address"):
        evaluation_job(str(tmp_path), None, {}, 1, ())


@pytest.mark.parametrize("command", [["check"], ["render", "slurm"], ["render", "kubernetes"]])
def test_each_command_that_shows_a_job_warns_of_its_secrets(tmp_path: Path, command: list[str]) -> None:
    path = job_file(
        tmp_path,
        env={"HF_TOKEN": "s3cr3t"},
        image={"tag": "clip:1"},
        slurm={"python": "/p/python"},
        kubernetes={"mounts": {"/runs": "pvc:runs"}},
        logging={"runs": "/runs"},
    )
    said = clipship(*command, path, *(["--no-data"] if command == ["check"] else []))
    assert "env.HF_TOKEN looks like a secret" in said.out + said.err
    assert "s3cr3t" not in said.err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pip_packages", ["mine @ https://user:s3cr3t@host/mine.whl"]),
        ("pip_packages", ["mine @ https://host/mine.whl?token=s3cr3t"]),
        ("pip_packages", ["mine @ https://host/mine.whl?X-Amz-Signature=s3cr3t"]),
        ("env", {"INDEX": "https://user:s3cr3t@host/simple"}),
        ("env", {"HF_TOKEN": "s3cr3t"}),
        ("env", {"PLAIN": "hf_" + "s3cr3t" * 5}),
        ("mirrors", {"pip": "https://host/simple?token=s3cr3t"}),
        ("mirrors", {"apt": "https://s3cr3t@host/debian"}),
    ],
)
def test_a_secret_that_would_enter_an_image_is_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(InputError, match=r"contains a |looks like a secret") as refused:
        load_job(job_file(tmp_path, image={key: value}))
    assert "s3cr3t" not in str(refused.value)
