"""`clipship clone` and `clipship diff`: a run's job as a new file, and what differs between runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.cli.main import main
from trainer.config.loader import dump_job, load_job

TOKEN = "ghp_" + "a1" * 18


def run_of(runs: Path, name: str, losses: list[float], top1: float | None = None, **sections: Any) -> Path:
    """A run folder with a record for each loss."""
    folder = runs / name
    folder.mkdir(parents=True)
    job = tiny_job(logging={"runs": str(runs)}, **sections).model_copy(update={"name": name})
    (folder / "job.toml").write_text(dump_job(job))
    events: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "samples_per_s": 10.0} for step, loss in enumerate(losses, start=1)
    ]
    if top1 is not None:
        events.append({"step": len(losses), "zero_shot_top1": top1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "environment.json").write_text(json.dumps([{"rank": "0", "torch": name}]))
    return folder


def test_clone_writes_what_differs_from_defaults_under_a_new_name(tmp_path: Path) -> None:
    folder = run_of(tmp_path, "one", [], optim={"lr": 0.25}, checkpoint={"longer": True}, slurm={})
    new = tmp_path / "sub" / "lower.toml"
    assert main(["clone", str(folder), str(new), "--set", "optim.weight_decay=0.5"]) == 0
    job = load_job(new)
    assert (job.name, job.optim.lr, job.optim.weight_decay) == ("lower", 0.25, 0.5)
    assert (job.model, list(job.schedulers)) == (load_job(folder / "job.toml").model, ["slurm"])
    assert not job.checkpoint.longer
    assert "beta1" not in new.read_text()


def test_clone_leaves_secrets_out_wherever_they_are_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = [{"name": "GITHUB_TOKEN", "value": "a-b-c"}, {"name": "PLAIN", "value": "kept"}]
    patch = {"spec": {"containers": [{"args": [["kept", TOKEN]], "name": "rank", "env": variables}]}}
    folder = run_of(
        tmp_path,
        "one",
        [],
        kubernetes={"patch": {"worker": patch}, "annotations": {"example.org/token": TOKEN, "a": "kept"}},
        data={"format": "webdataset", "train": ("s3://b/0.tar",)},
        stage=({"data": {"train": (f"https://h/x.tar?token={TOKEN}",), "workers": 2}},),
        env={"GITHUB_TOKEN": TOKEN, "PLAIN": "kept"},
    )
    new = tmp_path / "new.toml"
    assert main(["clone", str(folder), str(new)]) == 0
    assert TOKEN not in new.read_text()
    assert "a-b-c" not in new.read_text()
    job = load_job(new)
    assert job.env == {"PLAIN": "kept"}
    assert job.kubernetes is not None
    (container,) = job.kubernetes.patch.worker["spec"]["containers"]
    assert container == {"name": "rank", "env": ({"name": "GITHUB_TOKEN"}, variables[1])}
    assert job.kubernetes.annotations == {"a": "kept"}
    assert [dict(stage) for stage in job.stage] == [{"data": {"workers": 2}}]
    told = capsys.readouterr().err
    containers = "kubernetes.patch.worker.spec.containers"
    for key in (f"{containers}.env.value", f"{containers}.args", "stage.data.train", "env.GITHUB_TOKEN"):
        assert told.count(f"{key} was left out") == 1
    assert "kubernetes.annotations.example.org/token was left out" in told


def test_clone_keeps_a_file_that_is_there_and_another_name_than_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, new = run_of(tmp_path, "one", []), tmp_path / "one.toml"
    assert main(["clone", str(folder), str(new)]) == 0
    assert load_job(new).name == "one-2"
    assert main(["clone", str(folder), str(new), "--name", "three"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["clone", str(folder), str(new), "--name", "'three' # 3", "--force"]) == 0
    assert load_job(new).name == "'three' # 3"


def test_diff_shows_what_differs_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run_of(tmp_path, "one", [3.0, 1.5, 2.0], 0.5, optim={"lr": 0.25})
    other = run_of(tmp_path, "other", [3.0, 2.5], 0.75, data={"workers": 3})
    assert main(["diff", str(one), str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["job"]["optim.lr"] == {"one": "0.25", "other": "0.001"}
    assert list(found["job"]) == ["optim.lr"]
    assert list(found["data"]) == ["data.workers"]
    assert found["environment"] == {"torch": {"one": "one", "other": "other"}}
    assert found["results"]["lowest loss"] == {"one": "1.5 at step 2", "other": "2.5 at step 2"}
    assert found["results"]["best zero_shot_top1"] == {"one": "50.0 % at step 3", "other": "75.0 % at step 2"}
    assert "samples per second" not in found["results"]


@pytest.mark.parametrize("columns", [40, 200])
def test_diff_fits_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    one = run_of(tmp_path, "one", [3.0], optim={"lr": 0.25}, eval={"templates": "value " * 40 + "{}"})
    other = run_of(tmp_path, "other", [2.5])
    assert main(["diff", str(one), str(other)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["one", "other"]
    assert [line.split() for line in lines if "optim.lr" in line] == [["optim.lr", "0.25", "0.001"]]
    assert any("value" in line for line in lines)
    assert all(len(line) <= columns for line in lines if "value" not in line)


def test_diff_of_equal_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = run_of(tmp_path / "a", "one", [3.0]), run_of(tmp_path / "b", "one", [3.0])
    assert main(["diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_diff_wants_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run_of(tmp_path, "one", [3.0])
    assert main(["diff", str(one), str(one)]) == 2
    assert "name two runs or more" in capsys.readouterr().err
