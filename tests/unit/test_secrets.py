"""Secrets of a job stand in no record that others read.

`check` names them, and they are refused where they would enter an image.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from trainer.config.loader import load_job, recorded
from trainer.config.resume_rule import differences
from trainer.errors import InputError
from trainer.plan.trained import evaluation_job

SIGNED = "https://data.example/0.tar?X-Amz-Expires=9&X-Amz-Signature=s3cr3t"


ON_PODS = {
    "image": {"tag": "clip:1"},
    "kubernetes": {"mounts": {"/runs": "pvc:runs"}},
    "logging": {"runs": "/runs"},
}


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


def test_a_run_goes_on_though_its_addresses_were_signed_again(tmp_path: Path) -> None:
    before, now, elsewhere = (
        tiny_job(data={"train": (SIGNED.replace(*change),), "format": "webdataset"})
        for change in (("", ""), ("s3cr3t", "0ther"), ("0.tar", "1.tar"))
    )
    for there in (recorded(before), before.model_dump()):
        assert not list(differences(there, now.model_dump()))
    (told,) = differences(before.model_dump(), elsewhere.model_dump())
    assert "s3cr3t" not in told


def test_an_evaluation_does_not_begin_with_an_address_that_lost_its_secret(tmp_path: Path) -> None:
    job = tiny_job(eval={"retrieval": (SIGNED,)})
    (tmp_path / "model.pt").touch()
    (tmp_path / "manifest.json").write_text(json.dumps({"job": recorded(job)}))
    with pytest.raises(InputError, match="had a secret in its address"):
        evaluation_job(str(tmp_path), None, {}, 1, ())


def test_what_is_submitted_lies_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    runs = tmp_path / "runs"
    sections = {
        "env": {"HF_TOKEN": "s3cr3t"},
        "slurm": {"python": "/p/python"},
        "logging": {"runs": str(runs)},
    }
    assert clipship("submit", job_file(tmp_path, **sections), "--to", "slurm").code == 0
    holding = [path for path in runs.rglob("*") if path.is_file() and "s3cr3t" in path.read_text()]
    assert len(holding) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in holding} == {0o600}


@pytest.mark.parametrize(
    ("sections", "key", "advice"),
    [
        ({"env": {"HF_TOKEN": "s3cr3t"}}, "env.HF_TOKEN", "export HF_TOKEN in the shell"),
        ({"env": {"HF_TOKEN": "s3cr3t"}, **ON_PODS}, "env.HF_TOKEN", 'HF_TOKEN = "secret:SECRET:KEY"'),
        ({"slurm": {"setup": ["export API_KEY=s3cr3t"]}}, "slurm.setup", "batch script"),
        ({"data": {"train": "pipe:x -u a:s3cr3t", "stream_samples": 9}}, "data.train", "$NAME"),
    ],
)
def test_check_names_what_looks_like_a_secret_and_shows_no_value(
    tmp_path: Path, sections: dict[str, Any], key: str, advice: str
) -> None:
    said = "".join(clipship("check", job_file(tmp_path, **sections), "--no-data")[1:])
    assert f"{key} looks like a secret (" in " ".join(said.split())
    assert advice in " ".join(said.split())
    assert "s3cr3t" not in said


@pytest.mark.parametrize("command", [["check"], ["render", "slurm"], ["render", "kubernetes"]])
def test_each_command_that_shows_a_job_warns_of_its_secrets(tmp_path: Path, command: list[str]) -> None:
    path = job_file(tmp_path, env={"HF_TOKEN": "s3cr3t"}, slurm={"python": "/p/python"}, **ON_PODS)
    said = clipship(*command, path, *(["--no-data"] if command == ["check"] else []))
    assert "env.HF_TOKEN looks like a secret" in said.out + said.err
    assert "s3cr3t" not in said.err


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"train": SIGNED.replace("https", "no-such-protocol")}},
        {"image": {"mirrors": {"pip": "ftp://user:s3cr3t@host"}}},
        {"model": {"precision": "token=s3cr3t"}},
    ],
)
def test_no_message_of_check_holds_a_secret(tmp_path: Path, sections: dict[str, Any]) -> None:
    said = "".join(clipship("check", job_file(tmp_path, **sections))[1:])
    assert "***" in said
    assert "s3cr3t" not in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pip_packages", ["mine @ https://user:s3cr3t@host/mine.whl"]),
        ("pip_packages", ["mine @ https://host/mine.whl?token=s3cr3t"]),
        ("env", {"HF_TOKEN": "s3cr3t"}),
        ("env", {"PLAIN": "hf_" + "s3cr3t" * 5}),
        ("mirrors", {"pip": "https://host/simple?token=s3cr3t"}),
    ],
)
def test_a_secret_that_would_enter_an_image_is_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(InputError, match=r"contains a |looks like a secret") as refused:
        load_job(job_file(tmp_path, image={key: value}))
    assert "s3cr3t" not in str(refused.value)
