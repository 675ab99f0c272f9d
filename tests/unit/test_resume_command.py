"""`clipship resume`: what it starts from a run folder, and what it refuses."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from trainer.cli.main import main
from trainer.config import Job
from trainer.config.learning_rate import learning_rate
from trainer.config.loader import dump_job, load_job
from trainer.config.resume_rule import differences
from trainer.data.pack import write_shard
from trainer.errors import InputError
from trainer.run.job_limits import rank_job
from trainer.run.start_job import remove_start_jobs

Starts = list[dict[str, Any]]

JOB = """
name = "one"
[data]
format = "synthetic"
[model]
name = "ViT-B-32"
[optim]
global_batch_size = 8
steps = 5
[logging]
runs = "{runs}"
[checkpoint]
resume = "{resume}"
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """The runs that would have been started."""
    starts: Starts = []

    def run(job: Job, *, nproc: int | None, hosts: object, **_: object) -> int:
        starts.append({"job": job, "nproc": nproc, "hosts": hosts})
        return 0

    monkeypatch.setattr("trainer.launch.local.run", run)
    return starts


def folder(tmp_path: Path, nodes: Sequence[str] = ("here", "here"), resume: str = "auto") -> Path:
    made = tmp_path / "runs" / "one"
    made.mkdir(parents=True)
    (made / "job.toml").write_text(JOB.format(runs=tmp_path / "runs", resume=resume))
    ranks = [{"node": node, "launcher": "clipship run"} for node in nodes]
    (made / "environment.json").write_text(json.dumps(ranks))
    return made


def test_run_goes_on_with_its_own_job_and_as_many_ranks(tmp_path: Path, started: Starts) -> None:
    its = folder(tmp_path)
    clipship("resume", its, code=0)
    clipship("resume", its, "--nproc", "4", "--set", "timeouts.eval_s=7200", code=0)
    assert (started[0]["job"], started[0]["nproc"]) == (load_job(its / "job.toml"), 2)
    assert (started[1]["job"].timeouts.eval_s, started[1]["nproc"]) == (7200, 4)


def test_moved_folder_goes_on_where_it_is_and_begins_nothing_anew(tmp_path: Path, started: Starts) -> None:
    its = folder(tmp_path, resume="never")
    (tmp_path / "elsewhere").mkdir()
    its = its.rename(tmp_path / "elsewhere" / "one")
    clipship("resume", its, code=0)
    assert started[0]["job"].logging.runs == str(tmp_path / "elsewhere")
    assert started[0]["job"].checkpoint.resume == "auto"


TWO_NODES = '[{"node": "a"}, {"node": "b"}]'


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda its: (its / "result.json").touch(), "is done"),
        (lambda its: (its / "job.toml").rename(its / "other"), "has no job.toml"),
        (lambda its: its.rename(its.parent / "two"), "the run is one, so its folder needs that name"),
        (lambda its: (its / "environment.json").unlink(), "give --nproc or --hosts"),
        (lambda its: (its / "environment.json").write_text("[{}]"), "give --nproc or --hosts"),
        (lambda its: (its / "environment.json").write_text(TWO_NODES), "--hosts a:1,b:1"),
    ],
)
def test_what_cannot_go_on_is_refused_with_the_way_out(
    tmp_path: Path, started: Starts, change: Any, says: str
) -> None:
    its = folder(tmp_path)
    (its / "logs").mkdir()
    change(its)
    (its,) = its.parent.iterdir()
    assert says in clipship("resume", its, code=2).err
    assert not started


def test_run_that_was_stopped_before_its_first_step_goes_on_with_what_it_was_given(
    tmp_path: Path, started: Starts
) -> None:
    its = tmp_path / "runs" / "one"
    (its / "artefacts").mkdir(parents=True)
    job = JOB.format(runs=tmp_path / "runs", resume="auto").replace("steps = 5", "steps = 5\nlr = 0.002")
    (its / "artefacts" / "start-1.toml").write_text(job)
    (its / "exit.json").write_text('{"exit_code": 75, "reason": "asked to stop", "rank": 0}')
    for of_start in ({"ranks": 2, "hosts": ""}, {"ranks": 0, "hosts": "a:1,[fd00::2]:1"}):
        (its / ".start.json").write_text(json.dumps({"job": "start-1.toml", **of_start}))
        clipship("resume", its, code=0)
    here, on_hosts = started
    assert (here["nproc"], here["hosts"], here["job"].optim.lr) == (2, None, 0.002)
    assert [(host.name, host.slots) for host in on_hosts["hosts"]] == [("a", 1), ("fd00::2", 1)]
    assert f"`clipship resume {its}`; no checkpoint was saved" in clipship("status", its, code=0).out


def test_a_start_reads_its_own_job_whatever_becomes_of_the_file_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Starts
) -> None:
    monkeypatch.undo()  # the start itself is tried
    path, its = tmp_path / "job.toml", tmp_path / "runs" / "one"
    read: list[Path] = []

    def supervise(command: Sequence[str], env: Mapping[str, str], *_: object, **__: object) -> int:
        path.unlink()
        read.append(Path(command[-1]))
        assert read[0].parent == its / "artefacts"
        assert read[0].stat().st_mode & 0o777 == 0o600
        job = load_job(read[0])
        assert (job.optim.lr, job.env, job.logging.runs) == (0.002, {"A": "secret"}, str(tmp_path / "runs"))
        assert not any("secret" in word for word in command)
        return 75

    monkeypatch.setattr("trainer.launch.local.supervise", supervise)
    path.write_text(JOB.format(runs="runs", resume="auto"))
    words = ["--set", "optim.lr=0.002", "--set", "env.A=secret"]
    clipship("run", path, "--nproc", "2", *words, code=75)
    of_start = {"job": read[0].name, "ranks": 2, "hosts": ""}
    assert json.loads((its / ".start.json").read_text()) == of_start
    assert read[0].exists(), "no rank came to write the run's own file: resume needs this one"
    (its / ".start.json").write_text('{"job": 1}')
    assert "has no job.toml" in clipship("resume", its, code=2).err


@pytest.mark.parametrize(
    ("node", "says"), [("", "is gone: either the run folder was renamed"), ("n1", "node n1 does not")]
)
def test_a_rank_that_finds_no_job_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, says: str
) -> None:
    monkeypatch.setattr("trainer.run.start_job.APPEARS_S", 0.0)
    with pytest.raises(InputError, match=says):
        rank_job(tmp_path / "artefacts" / "start-1.toml", (), node)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """The runs that would have been submitted."""
    words: Starts = []
    monkeypatch.setattr("trainer.cli.submit.command.callback", lambda **given: words.append(given))
    return words


def submitted(its: Path) -> None:
    (its / "artefacts").mkdir()
    record = '{"to": "slurm", "id": "7", "at": "now", "details": {}}'
    (its / "artefacts" / "submission.json").write_text(record)


def test_submitted_run_is_submitted_again(tmp_path: Path, asked: Starts) -> None:
    its = folder(tmp_path)
    submitted(its)
    clipship("resume", its, code=0)
    clipship("resume", its, "--no-check", code=0)
    same = {"job_path": its / "job.toml", "to": "slurm", "overrides": ()}
    assert asked == [{**same, "no_check": False}, {**same, "no_check": True}]
    said = clipship("resume", its, "--no-check", "--nproc", "1", code=2).err
    assert "--no-check is for a run that is submitted again" in said


def test_name_and_length_of_a_run_are_options(tmp_path: Path, started: Starts) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(runs="runs", resume="auto"))
    clipship("run", path, "--nproc", "1", "--name", '"try" # 2', code=0)
    assert started[0]["job"].name == '"try" # 2', "as it was typed"
    clipship("run", folder(tmp_path) / "job.toml", "--nproc", "1", "--longer", "epochs=7", code=0)
    assert (started[1]["job"].optim.steps, started[1]["job"].optim.epochs) == (None, 7)


def reaches(run: Path, step: int, samples: int = 80) -> None:
    """Gives the run a checkpoint, which says how many samples an epoch has."""
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(json.dumps({"step": step, "data_samples": samples}))


SHARDS = JOB.replace('format = "synthetic"', 'train = "{shards}"').replace("steps = 5", "epochs = 2")


def of_shards(tmp_path: Path) -> Path:
    """A run of 2 epochs of shards that nobody has counted; by its checkpoint an epoch has 10 steps."""
    its = folder(tmp_path)
    shard = tmp_path / "a.tar"
    write_shard([("a", {"png": b"png", "txt": b"text"})], shard)
    (its / "job.toml").write_text(SHARDS.format(runs=tmp_path / "runs", resume="auto", shards=shard))
    return its


def test_the_number_of_longer_is_checked_where_nobody_knows_the_steps(
    tmp_path: Path, started: Starts
) -> None:
    its = of_shards(tmp_path)
    for change, code, says in (
        ("--longer=epochs=1", 2, "has 2 epochs already; 1 are not more (--shorter is for the other way)"),
        ("--shorter=epochs=3", 2, "has 2 epochs already; 3 are not fewer (--longer is for the other way)"),
        ("--longer=epochs=3", 0, "the run goes on to 3 epochs"),
        ("--shorter=epochs=1", 0, "the run ends at 1 epoch"),
    ):
        assert says in clipship("resume", its, change, code=code).err
    assert len(started) == 2


def test_a_run_that_is_made_shorter_decays_from_where_it_is(tmp_path: Path, started: Starts) -> None:
    its = of_shards(tmp_path)
    reaches(its, 6)
    told = clipship("resume", its, "--shorter", "steps=10", code=0).err
    assert "the run ends at step 10 in place of 20; from step 7 on its learning rate falls from" in told
    job, before = started[0]["job"], load_job(its / "job.toml")
    assert (job.optim.steps, job.optim.epochs, job.checkpoint.shorter) == (10, None, True)
    rates = [learning_rate(job.optim, step, 10) for step in range(6, 11)]
    assert rates[0] == learning_rate(before.optim, 6, 20)
    assert rates == pytest.approx([rates[0] * share for share in (1, 0.75, 0.5, 0.25, 0)])
    assert not list(differences(before.model_dump(), job.model_dump())), "it is the same run"
    assert list(differences(job.model_dump(), before.model_dump())), "and goes back only by --longer"
    (its / "job.toml").write_text(dump_job(job))
    reaches(its, 8)
    for change in (("--shorter", "steps=9"), ("--longer", "steps=40")):
        clipship("resume", its, *change, code=0)
    assert started[1]["job"].optim.decay_from_lr == pytest.approx(rates[2]), "again"
    assert started[2]["job"].optim.decay_from_step is None


def test_a_run_that_is_submitted_again_says_what_its_new_length_does(tmp_path: Path, asked: Starts) -> None:
    its = of_shards(tmp_path)
    reaches(its, 18)
    submitted(its)
    told = clipship("resume", its, "--longer", "epochs=4", code=0).err
    assert "goes on to step 40 in place of 20" in told
    assert "step 19 has 0.000289, 11 times as much, after 2.72e-05 in step 18" in told
    assert "checkpoint.longer=true" in asked[0]["overrides"]
    clipship("resume", its, "--longer", "epochs=1", code=2)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("steps=4",), "has 5 steps already; 4 are not more (--shorter is for the other way)"),
        (("20000",), "give the new length of the whole run, as steps=20000"),
        (("steps=5; epochs=2",), "give the new length"),
        (("steps=30", "--shorter", "steps=9"), "give either --longer or --shorter"),
        (("steps=9", "--fresh"), "give either --longer or --fresh"),
        (("steps=9", "--set", "name=two"), "--longer goes on with a run, and"),
    ],
)
def test_longer_that_is_not_longer_is_refused(
    tmp_path: Path, started: Starts, words: tuple[str, ...], says: str
) -> None:
    its = folder(tmp_path)
    run = ["run", str(its / "job.toml")] if "--fresh" in words or "--set" in words else ["resume", str(its)]
    assert says in clipship(*run, "--longer", *words, code=2).err
    assert not started


@pytest.mark.parametrize("option", ["--longer", "--shorter"])
def test_a_length_that_the_run_has_already_is_no_other(tmp_path: Path, started: Starts, option: str) -> None:
    """A command that was stopped may be given again."""
    its = of_shards(tmp_path)
    reaches(its, 6)
    for number, says in (("6", "has done 6 steps, and 6 are not more"), ("21", "21 are not fewer")):
        assert says in clipship("resume", its, "--shorter", f"steps={number}", code=2).err
    for again in (f"{option}=steps=20", f"{option}=epochs=2"):
        assert "has this length already" in clipship("resume", its, again, code=0).err
    reaches(its, 8)
    clipship("resume", its, "--shorter", "steps=10", code=0)
    (its / "job.toml").write_text(dump_job(started[-1]["job"]))
    user = tmp_path / "job.toml"
    user.write_text(SHARDS.format(runs=tmp_path / "runs", resume="auto", shards=tmp_path / "a.tar"))
    told = clipship("run", user, "--nproc", "2", code=2).err
    assert f"to go on to the length that it has: clipship resume {its}" in told
    assert "to this one: give --longer epochs=2" in told
    clipship("run", user, "--nproc", "2", f"{option}=steps=10", code=0)
    assert started[-1]["job"].optim.decay_from_step == 8, "the decay that was asked for goes on"


def test_a_start_that_no_rank_took_over_is_what_goes_on(tmp_path: Path, started: Starts) -> None:
    """So a longer run that was stopped while its ranks connected does not answer that it is done."""
    its = folder(tmp_path)
    (its / "result.json").write_text('{"reason": "done", "steps": 5}')
    os.utime(its / "job.toml", (1, 1))
    clipship("resume", its, "--longer", "steps=9", code=0)
    of_start = its / "artefacts" / "start-1.toml"
    of_start.parent.mkdir(exist_ok=True)
    of_start.write_text(dump_job(started[0]["job"]))
    (its / ".start.json").write_text(json.dumps({"job": of_start.name, "ranks": 2, "hosts": ""}))
    others = [of_start.with_name(f"start-{number}.toml") for number in (2, 3)]
    for other in others:  # one may be between two generations; one was left behind long ago
        other.write_text(of_start.read_text())
    os.utime(others[1], (time.time() - 40 * 86400,) * 2)
    remove_start_jobs(its, of_start)
    assert [path.exists() for path in (of_start, *others)] == [True, True, False]
    clipship("resume", its, code=0)
    assert started[1]["job"].optim.steps == 9

    (its / "job.toml").write_text(dump_job(started[1]["job"]))
    remove_start_jobs(its, of_start)
    assert not of_start.exists(), "a rank has written it as the run's own"
    assert others[0].exists()
    (its / "result.json").write_text('{"reason": "done", "steps": 9}')
    assert "this run is done" in clipship("resume", its, code=0).out
    assert len(started) == 2


# `clipship clone` and `clipship diff`: a run's job as a new file, and what differs between runs.

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
    clipship("clone", folder, new, "--set", "optim.weight_decay=0.5", code=0)
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


def test_clone_keeps_a_file_that_is_there_and_another_name_than_the_runs(tmp_path: Path) -> None:
    folder, new = run_of(tmp_path, "one", []), tmp_path / "one.toml"
    clipship("clone", folder, new, code=0)
    assert load_job(new).name == "one-2"
    assert "exists already" in clipship("clone", folder, new, "--name", "three", code=2).err
    clipship("clone", folder, new, "--name", "'three' # 3", "--force", code=0)
    assert load_job(new).name == "'three' # 3"


def test_diff_shows_what_differs_and_nothing_else(tmp_path: Path) -> None:
    one = run_of(tmp_path, "one", [3.0, 1.5, 2.0], 0.5, optim={"lr": 0.25})
    other = run_of(tmp_path, "other", [3.0, 2.5], 0.75, data={"workers": 3})
    found = json.loads(clipship("diff", one, other, "--json", code=0).out)
    assert found["job"]["optim.lr"] == {"one": "0.25", "other": "0.001"}
    assert list(found["job"]) == ["optim.lr"]
    assert list(found["data"]) == ["data.workers"]
    assert found["environment"] == {"torch": {"one": "one", "other": "other"}}
    assert found["results"]["lowest loss"] == {"one": "1.5 at step 2", "other": "2.5 at step 2"}
    assert found["results"]["best zero_shot_top1"] == {"one": "50.0 % at step 3", "other": "75.0 % at step 2"}
    assert "samples per second" not in found["results"]


@pytest.mark.parametrize("columns", [40, 200])
def test_diff_fits_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    one = run_of(tmp_path, "one", [3.0], optim={"lr": 0.25}, eval={"templates": "value " * 40 + "{}"})
    other = run_of(tmp_path, "other", [2.5])
    lines = clipship("diff", one, other, code=0).out.splitlines()
    assert lines[0].split() == ["one", "other"]
    assert [line.split() for line in lines if "optim.lr" in line] == [["optim.lr", "0.25", "0.001"]]
    assert any("value" in line for line in lines)
    assert all(len(line) <= columns for line in lines if "value" not in line)


def test_diff_of_equal_runs_says_so(tmp_path: Path) -> None:
    one, other = run_of(tmp_path / "a", "one", [3.0]), run_of(tmp_path / "b", "one", [3.0])
    assert clipship("diff", one, other, code=0).out == "no difference\n"


def test_diff_wants_two_runs(tmp_path: Path) -> None:
    one = run_of(tmp_path, "one", [3.0])
    assert "name two runs or more" in clipship("diff", one, one, code=2).err
