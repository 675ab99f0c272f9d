"""`clipship check` says how long a save on request takes, and where spare nodes have no nodes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from tests.support.report_folders import restarted_run
from trainer.cli.main import main
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.config.loader import dump_job
from trainer.estimate.size import checkpoint_bytes
from trainer.launch import local
from trainer.plan.describe import Facts, all_warnings, describe
from trainer.plan.save import ASSUMED_BYTES_S, NOTICES, SaveTime, save_time, too_little_notice


def job_of(model: str = "ViT-L-14", **sections: Any) -> Job:
    return tiny_job(**{"model": {"name": model}, **sections})


def time_of(job: Job) -> SaveTime:
    found = save_time(job, plan(job, 1))
    assert found is not None
    return found


def test_without_a_run_the_size_and_an_assumed_rate_count(tmp_path: Path) -> None:
    job = job_of(logging={"runs": str(tmp_path)})
    size = checkpoint_bytes(job)
    assert size is not None
    save = time_of(job)
    assert save.seconds == pytest.approx(size.total / ASSUMED_BYTES_S)
    assert save.parts() == "2 steps, whose time is not known yet, and 5.13 GB at 0.25 GB/s (assumed)"
    assert "stop        at least 20.5 s from a request to the saved checkpoint: 2 steps, whose" in describe(
        job, 1, 64, local=True
    )


def test_two_steps_count_where_their_time_can_be_estimated() -> None:
    plain, known = job_of(), job_of(resources={"gpus_per_node": 1, "gpu": "H100"})
    save = time_of(known)
    assert save.step_s is not None
    assert save.seconds == pytest.approx(time_of(plain).seconds + 2 * save.step_s)
    assert "(estimated)" in save.parts()


def test_a_run_that_has_saved_gives_its_own_times(tmp_path: Path) -> None:
    job = job_of(logging={"runs": str(tmp_path)})
    folder = tmp_path / job.name
    folder.mkdir()
    (folder / "job.toml").write_text(dump_job(job))
    lines = [{"step": step, "checkpoint": f"step-{step}", "write_s": step} for step in (3, 5, 90)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    save = time_of(job)
    assert (save.write_s, save.parts()) == (
        5,
        "2 steps, whose time is not known yet, and 5.0 s for a checkpoint (measured)",
    )


def interval(job: Job, *, local: bool = False) -> str:
    rows = describe(job, 16, 64, local=local).splitlines()
    return "".join(row for row in rows if row.startswith("interval "))


def test_the_best_interval_follows_from_faults_and_the_wait_at_a_checkpoint(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "resources": {"nodes": 2, "gpus_per_node": 8},
        "logging": {"runs": str(tmp_path)},
    }
    best = "interval    a checkpoint every 71 minutes loses the least time (Young/Daly), if each of 2 nodes "
    waits = (
        "fails once in 5,000 h (assumed) and training waits 1.0 s (assumed) for a checkpoint; this job saves "
        "every "
    )
    assert interval(job_of(**keys)) == f"{best}{waits}30:00"
    assert interval(job_of(**keys), local=True) == ""
    assert interval(job_of(**keys, recovery={"max_restarts": 3})) == "", "its steps are in memory"
    folder = restarted_run(tmp_path / job_of().name)
    lap = {
        "event": "steps",
        "time": 90_060.0,
        "step": 1110,
        "steps": 10,
        "seconds": 14.0,
        "checkpoint_s": 4.0,
    }
    saves = ({"event": "save", "step": step, "time": 90_055.0} for step in (1105, 1110))
    with open(folder / "goodput.jsonl", "a") as times:
        times.writelines(f"{json.dumps(line)}\n" for line in (*saves, lap))
    measured = interval(job_of(**keys, checkpoint={"every_steps": 500}))
    assert "every 100 minutes loses" in measured
    assert "waits 2.0 s (measured)" in measured
    assert measured.endswith("saves every 30:00 and every 500 steps (8:20)")


def test_nothing_is_said_of_a_model_of_unknown_size() -> None:
    job = job_of("RN50")
    assert save_time(job, plan(job, 1)) is None
    assert list(too_little_notice(job, None)) == []


@pytest.mark.parametrize("key", NOTICES)
def test_a_notice_that_is_too_short_is_named_with_both_numbers(key: str) -> None:
    section, name = key.split(".")
    save = SaveTime(40.0, "10 GB at 0.25 GB/s (assumed)", 1.5, "measured")
    jobs: list[dict[str, Any]] = [{section: {name: seconds}} for seconds in (42, 43)]
    short, long = ([text for text in too_little_notice(tiny_job(**job), save) if key in text] for job in jobs)
    text = (
        "after a request to stop the ranks save for about 43.0 s (2 steps of 1.5 s (measured), and 10 GB at "
        f"0.25 GB/s (assumed)), longer than {key} = 42: raise it to 43 or more"
    )
    assert (short, long) == ([text], [])


@pytest.mark.parametrize(
    ("recovery", "said"),
    [
        ({}, "such an end costs the steps since the last checkpoint, which checkpoint.every_minutes bounds"),
        (
            {"max_restarts": 3, "spare_nodes": 1},
            "if only some nodes are taken, the others go on from the step in their memory",
        ),
    ],
)
def test_thirty_seconds_are_compared_on_a_cluster_alone(recovery: dict[str, Any], said: str) -> None:
    save = SaveTime(31.0, "a checkpoint", None, "")
    (text,) = too_little_notice(job_of(slurm={}, recovery=recovery), save)
    assert text.endswith(
        f"longer than the 30 s of warning that scancel and spot instances mostly give: {said}"
    )
    assert list(too_little_notice(job_of(recovery=recovery), save)) == []
    assert list(too_little_notice(job_of(slurm={}), SaveTime(29.0, "a checkpoint", None, ""))) == []


SPARES = {"max_restarts": 3, "spare_nodes": 1}
NODES = {"nodes": 2, "gpus_per_node": 0}


HERE = "recovery.spare_nodes = 1, but a run on this machine has 1 node and no spare: "
BY_HAND = "recovery.spare_nodes = 1, and no scheduler of this job allocates nodes: "
HOSTS = "name 3 nodes with --hosts, of which the last is a spare"
SUBMIT = ", or submit the job: [slurm] asks for as many"


@pytest.mark.parametrize(
    ("sections", "local", "said"),
    [
        ({}, True, HERE + HOSTS),
        ({"slurm": {}}, True, HERE + HOSTS + SUBMIT),
        ({}, False, BY_HAND + HOSTS),
        ({"slurm": {}}, False, None),
    ],
)
def test_spares_without_nodes_are_told_with_the_number(
    sections: dict[str, Any], local: bool, said: str | None
) -> None:
    job = tiny_job(recovery=SPARES, resources=NODES, **sections)
    warnings = all_warnings(Facts.of(job, 2, 64, local=local, files=False))
    assert [text for text in warnings if "spare" in text] == ([] if said is None else [said])


def test_nodes_of_a_scheduler_are_counted_with_the_spares() -> None:
    job = tiny_job(recovery={**SPARES, "spare_nodes": 2}, resources=NODES, slurm={})
    assert (
        "2 ranks: 2 nodes of 1 rank ([resources]), and 2 spare nodes (recovery.spare_nodes): 4 nodes in all"
        in describe(job, 2, 64, local=False, files=False)
    )


@pytest.mark.parametrize(("where", "said"), [(("--nproc", "2"), 1), (("--hosts", "a:1,b:1,c:1"), 0)])
def test_run_says_it_where_all_ranks_are_on_this_machine(
    where: tuple[str, str],
    said: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(local, "run", lambda *_args, **_named: 0)  # no rank need start for that
    path = tmp_path / "job.toml"
    path.write_text(dump_job(tiny_job(recovery=SPARES, resources=NODES, logging={"runs": str(tmp_path)})))
    assert main(["run", str(path), *where]) == 0
    assert capfd.readouterr().err.count(f"clipship: warning: {HERE}{HOSTS}") == said
