"""With --json, stdout of check and status is one JSON object and nothing else."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import clipship
from tests.support.jobs import VIT

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


def printed(*words: str, code: int = 0) -> dict[str, Any]:
    """Run a command; returns its object. Fails if stdout has more than one line."""
    out = clipship(*words, code=code).out
    assert out.count("\n") == 1
    values = json.loads(out)
    assert isinstance(values, dict)
    return values


def test_check_gives_what_the_table_says_as_numbers() -> None:
    values = printed("check", "job.toml", "--nproc", "2", "--json")
    numbers = {"ranks": 2, "samples": 1024, "steps": 48, "micro_batch_size": 16, "accumulation": 1}
    assert {name: values[name] for name in numbers} == numbers
    assert (values["ok"], values["warnings"], values["no_effect"], values["hours"]) == (True, [], {}, None)
    assert values["run_folder"] == f"{Path.cwd()}/runs/mine"
    assert 0 < values["checkpoint_bytes"] < values["disk_free_bytes"]
    table = [line[12:] for line in clipship("check", "job.toml", "--nproc", "2").out.splitlines()]
    said = [text for texts in values["rows"].values() for text in texts]
    sizes = r"[\d,.]+ (fit|GB|MB)"  # the disk's free bytes change
    assert [re.sub(sizes, "", text) for text in said] == [re.sub(sizes, "", text) for text in table]


def test_check_estimates_nothing_of_a_job_with_a_teacher_whose_part_nobody_knows() -> None:
    teacher = ("--set", "model.teacher=ViT-B-32", "--set", "model.teacher_pretrained=openai")
    gpu = ("--set", "resources.gpu=RTX-4090", "--set", "resources.gpus_per_node=2")
    values = printed("check", "job.toml", "--json", *gpu, *teacher)
    assert [values[name] for name in ("gpu_bytes", "samples_per_s", "hours")] == [None, None, None]
    assert any("of the teacher" in text for text in values["rows"]["memory"])


def test_secrets_and_control_characters_do_not_reach_stdout() -> None:
    keys = ("logging.runs='/tmp/\x1b[31m'", "data.train=https://me:s3cr3t@host/{0..1}.tar")
    words = [word for key in (*keys, "data.format=webdataset") for word in ("--set", key)]
    values = printed("check", "job.toml", "--json", "--no-data", *words)
    assert "\x1b" in values["run_folder"], "JSON escapes it"
    assert "s3cr3t" not in json.dumps(values)


def _run_folder(name: str = "mine") -> Path:
    folder = Path("runs", name)
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text('name = "mine"\n[optim]\nsteps = 100\n')
    return folder


def _record(step: int, **changes: float) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "loss": 2.5, "samples_per_s": 100.0, "step_s": 2.0, **changes}


def _metrics(folder: Path, *events: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_status_of_a_running_run() -> None:
    folder = _run_folder()
    events = ({"step": 40, "checkpoint": "x/step-00000040"}, {"step": 40, "zero_shot_top1": 0.5})
    _metrics(folder, _record(1, samples_per_s=1.0), _record(40), *events, _record(60))
    values = printed("status", "mine", "--json")
    assert (values["run"], values["state"]) == ("runs/mine", "alive")
    assert (values["done"], values["end"]) == (False, None)
    assert (values["step"], values["steps"], values["epoch"], values["loss"]) == (60, 100, 0, 2.5)
    assert (values["samples_per_s"], values["left_s"]) == (100, 80)
    assert values["evaluation"] == {"step": 40, "zero_shot_top1": 0.5}
    assert values["checkpoint"] == {"step": 40, "path": "x/step-00000040"}
    assert values["last_sign"] == pytest.approx(os.stat(folder / "metrics.jsonl").st_mtime)


def test_status_of_a_failed_run_has_its_end() -> None:
    folder = _run_folder()
    _metrics(folder, _record(8, loss=float("nan")))
    cause = {"rank": 3, "node": "n2", "exit_code": 1, "reason": "killed", "time": 5.0, "details": "x"}
    (folder / "exit.json").write_text(json.dumps(cause))
    values = printed("status", "mine", "--json")
    assert values["state"] == "ended"
    assert values["end"] == {name: cause[name] for name in ("rank", "node", "exit_code", "reason", "time")}
    assert (values["loss"], values["left_s"]) == (None, None), "JSON has no NaN"


def test_the_help_names_every_field() -> None:
    _metrics(_run_folder("other"), _record(8))
    for words in (("check", "job.toml"), ("status", "other")):
        values = printed(*words, "--json")
        text = clipship(words[0], "--help").out.partition("The object of --json has")[2]
        missing = [name for name in values if not re.search(rf"\b{name}\b", text)]
        assert missing == []
