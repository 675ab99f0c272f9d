"""With --json, stdout of check and status is one JSON object and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import VIT
from trainer.cli.main import main

Capture = pytest.CaptureFixture[str]

JOB = f"""
name = "mine"
[data]
format = "synthetic"
[model]
name = "{VIT}"
[optim]
global_batch_size = 32
steps = 48
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)


def printed(capsys: Capture, *words: str, code: int = 0) -> dict[str, Any]:
    """Run a command; returns its object. Fails if stdout has more than one line."""
    assert main(words) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    values = json.loads(out)
    assert isinstance(values, dict)
    return values


def test_check_estimates_nothing_of_a_job_with_a_teacher_whose_part_nobody_knows(capsys: Capture) -> None:
    teacher = ("--set", "model.teacher=ViT-B-32", "--set", "model.teacher_pretrained=openai")
    gpu = ("--set", "resources.gpu=RTX-4090", "--set", "resources.gpus_per_node=2")
    values = printed(capsys, "check", "job.toml", "--json", *gpu, *teacher)
    assert [values[name] for name in ("gpu_bytes", "samples_per_s", "hours")] == [None, None, None]
    assert any("of the teacher" in text for text in values["rows"]["memory"])


def test_secrets_and_control_characters_do_not_reach_stdout(capsys: Capture) -> None:
    keys = ("logging.runs='/tmp/\x1b[31m'", "data.train=https://me:s3cr3t@host/{0..1}.tar")
    words = [word for key in (*keys, "data.format=webdataset") for word in ("--set", key)]
    values = printed(capsys, "check", "job.toml", "--json", "--no-data", *words)
    assert "\x1b" in values["run_folder"], "JSON escapes it"
    assert "s3cr3t" not in json.dumps(values)
