"""`submit`, `status` and `cancel` with answers of Slurm's commands.

A real Slurm does not give these answers at will, so that stand-ins give them.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Said, clipship

JOB = """\
name = "mine"
[data]
format = "synthetic"
[model]
name = "ViT-S-32-alt"
[optim]
global_batch_size = 32
epochs = 2
[slurm]
gpus = "none"
"""


FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
NO_CONTROLLER = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
RUNNING = "echo 'RUNNING|0:05|1:00|1|None|n1'"
"""Answers of squeue."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a job file in it, and no command of Slurm's on PATH but those that a test makes."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/sbin")
    return tmp_path


def answers(folder: Path, command: str, script: str) -> None:
    """Let the command be this shell script."""
    path = folder / "bin" / command
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def submit(*overrides: str, code: int = 0) -> Said:
    words = (word for override in overrides for word in ("--set", override))
    return clipship("submit", "job.toml", "--to", "slurm", *words, code=code)


def submitted(folder: Path, job_id: str = "7", **details: str) -> Path:
    run = folder / "runs" / "mine"
    (run / "artefacts").mkdir(parents=True)
    known = {"to": "slurm", "id": job_id, "at": "2026-01-02T03:04:05+00:00", "details": details}
    (run / "artefacts" / "submission.json").write_text(json.dumps(known))
    return run


def record_of(run: Path) -> Any:
    return json.loads((run / "artefacts" / "submission.json").read_text())


def test_text_of_a_site_before_the_job_id_is_not_taken_for_it(folder: Path) -> None:
    answers(folder, "sbatch", "echo '-----'; echo 'Welcome to the 3 machines'; echo '1234567;big'")
    _, out, err = submit("name=a b")
    assert out == "1234567\n"
    assert err.endswith(f"\nsubmitted to slurm; next: clipship status '{folder}/runs/a b'\n")
    assert record_of(folder / "runs" / "a b")["details"] == {"cluster": "big"}
    answers(folder, "sbatch", "echo queued")
    assert "sbatch printed no job number" in submit("name=other", code=1).err


def test_the_session_that_a_job_is_submitted_from_is_not_the_jobs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(folder, "sbatch", f"/usr/bin/env >{folder}/environment; echo 42")
    for name in ("SLURM_CPU_BIND", "SLURM_MEM_PER_CPU", "SLURM_JOB_ID", "SLURM_CONF", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv("LC_ALL", raising=False)
    submit()
    names = {line.partition("=")[0] for line in (folder / "environment").read_text().splitlines()}
    own = {name for name in names if name.startswith(("SLURM", "SBATCH"))}
    assert own == {"SLURM_CONF", "SBATCH_ACCOUNT"}
    assert "LC_ALL" not in names


def test_a_refusal_leaves_no_folder_that_looks_like_a_run(folder: Path) -> None:
    said = "Invalid account or account/partition combination specified"
    answers(folder, "sbatch", f"echo 'sbatch: error: Batch job submission failed: {said}' >&2; exit 1")
    assert "change slurm.account, slurm.partition" in submit(code=2).err
    assert not (folder / "runs" / "mine").exists()
    assert "has no run folder here" in clipship("logs", "-f", "job.toml", code=2).err


def test_submit_makes_no_folder_where_file_systems_are_mounted(folder: Path) -> None:
    answers(folder, "sbatch", "echo 7")
    runs = "/not-mounted-on-this-machine/runs"
    said = submit(f"logging.runs={runs}", code=2).err
    assert "this machine has no /not-mounted-on-this-machine. Start from a machine" in said
    assert not Path(runs).parent.exists()


def test_without_slurm_submit_says_where_to_go(folder: Path) -> None:
    err = submit(code=1).err
    assert "\nclipship: sbatch is not on PATH: run this on a machine with Slurm's commands" in err
    assert "clipship render slurm JOB > train.sbatch" in err


def test_a_run_that_is_queued_already_is_not_submitted_again(folder: Path) -> None:
    submitted(folder)
    answers(folder, "squeue", "echo 'PENDING|0:00|30:00|2|Priority|'")
    answers(folder, "sbatch", f"touch {folder}/called")
    assert "is already Slurm job 7 (PENDING)" in submit(code=2).err
    assert not (folder / "called").exists()


def test_status_says_why_a_job_waits(folder: Path) -> None:
    submitted(folder)
    answers(folder, "squeue", "echo 'PENDING|0:00|30:00|2|Resources|'")
    assert clipship("status", "mine", code=0).out == (
        "run         runs/mine\n"
        "state       PENDING\n"
        "job         7 on Slurm since 2026-01-02T03:04:05+00:00\n"
        "reason      Resources\n"
        "time        0:00 of 30:00, 2 nodes\n"
        "step        none: no rank has started\n"
    )


PENDING, OVER = "PENDING|0:00|1:00|1|JobArrayTaskLimit|", "COMPLETED|1:00|1:00|1|None|n1"
ACCOUNTING_IS_OFF = ["state       unknown: Slurm no longer knows the job, and accounting is off\n"]


@pytest.mark.parametrize(
    ("squeue", "sacct", "rows"),
    [
        (
            f"echo '{PENDING}'; {RUNNING}; echo '{OVER}'",  # the jobs of an array
            None,
            ["state       PENDING, RUNNING, COMPLETED\n", "time        0:05 of 1:00, 1 node on n1\n"],
        ),
        (
            FORGOTTEN,
            "echo 'FAILED|00:10:00|00:30:00|2|1:0|n[1-2]'",
            ["state       FAILED, exit code 1:0\n", "time        00:10:00 of 00:30:00, 2 nodes on n[1-2]\n"],
        ),
        (FORGOTTEN, "echo 'Slurm accounting storage is disabled' >&2; exit 1", ACCOUNTING_IS_OFF),
        (FORGOTTEN, None, ACCOUNTING_IS_OFF),
    ],
    ids=["array", "forgotten", "accounting off", "no accounting"],
)
def test_status_of_a_job_comes_from_the_queue_or_from_accounting(
    folder: Path, squeue: str, sacct: str | None, rows: list[str]
) -> None:
    submitted(folder)
    answers(folder, "squeue", squeue)
    if sacct:
        answers(folder, "sacct", sacct)
    shown = clipship("status", "mine", code=0).out
    assert [row for row in rows if row not in shown] == []


def test_a_controller_that_is_down_is_told_and_what_the_run_folder_knows_is_shown(folder: Path) -> None:
    run = submitted(folder)
    (run / "exit.json").write_text(
        '{"rank": 1, "node": "n1", "exit_code": 1, "reason": "out of memory", "time": 0.0}'
    )
    answers(folder, "squeue", NO_CONTROLLER)
    shown = clipship("status", "mine", code=1).out
    assert "state       unknown: squeue: slurm_load_jobs error: Unable to contact slurm controller\n" in shown
    assert "ended       exit code 1, rank 1 on n1: out of memory" in shown


def test_following_outlasts_a_controller_that_is_busy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = submitted(folder)
    (run / "logs").mkdir()
    (run / "logs" / "rank-00000.log").write_text("one\ntwo")
    # Asked three times: it runs; no answer; it is over.
    answers(
        folder,
        "squeue",
        f"""echo . >>{folder}/asked
            case $(/usr/bin/wc -l <{folder}/asked) in
            1) echo 'RUNNING|0:05|1:00|1|None|n1' ;;
            2) echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1 ;;
            *) echo 'COMPLETED|0:05|1:00|1|None|n1' ;;
            esac""",
    )
    monotonic, slept = time.monotonic, [0.0]
    monkeypatch.setattr("time.sleep", lambda seconds: slept.append(slept[-1] + seconds))
    monkeypatch.setattr("time.monotonic", lambda: monotonic() + slept[-1])
    assert clipship("logs", "-f", "mine", code=0).out == "[0] one\n[0] two\n"
    assert len((folder / "asked").read_text().splitlines()) > 2
    answers(folder, "squeue", NO_CONTROLLER)
    clipship("logs", "-f", "mine", code=1)  # one that has never answered


@pytest.mark.parametrize("job_id", ["7", "7_12"])
def test_a_job_of_another_cluster_is_asked_for_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, job_id: str
) -> None:
    submitted(folder, job_id, cluster="big-1")
    answers(folder, "squeue", f'echo "$LC_ALL $*" >{folder}/called; {RUNNING}')
    answers(folder, "scancel", f'echo "$*" >{folder}/cancelled')
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    clipship("status", "mine", code=0)
    assert (folder / "called").read_text().startswith("C "), "answers are read in English"
    assert "--clusters=big-1" in (folder / "called").read_text()
    clipship("cancel", "mine", code=0)
    assert (folder / "cancelled").read_text() == f"--clusters=big-1 {job_id}\n"


def test_a_record_that_another_user_wrote_ends_no_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared folder it may name any job of the user who reads it."""
    submitted(folder)
    answers(folder, "squeue", RUNNING)
    answers(folder, "scancel", f"touch {folder}/cancelled")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "was written by another user" in clipship("cancel", "mine", code=2).err
    assert not (folder / "cancelled").exists()


def test_logs_of_a_script_that_was_submitted_by_hand_are_where_slurm_has_them(folder: Path) -> None:
    submitted(folder)
    (folder / "slurm-7.out").write_text("clipship: no such image\n")
    answers(folder, "scontrol", f'echo "JobId=7 JobName=mine"; echo "   StdOut={folder}/slurm-7.out"')
    assert clipship("logs", "mine", code=0).out == "[slurm] clipship: no such image\n"


GRID = ("--grid", "optim.lr=1e-4,3e-4", "--grid", "seed=0,1")


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "--me"},
        {"id": "77_[1-9]"},
        {"id": "77\n"},
        {"id": 77},
        {"at": 5},
        {"to": ["slurm"]},
        {"details": {"cluster": "all"}},
        {"details": {"cluster": "--me"}},
        {"details": {"output": 3}},
        {"details": []},
        *("5", "[]", "null", "[" * 100_000, '{"to": ' * 50_000, "\0", ""),
    ],
)
def test_a_record_that_slurm_did_not_give_reaches_no_command_of_it(
    folder: Path, wrong: dict[str, object] | str
) -> None:
    path = submitted(folder) / "artefacts" / "submission.json"
    known = json.loads(path.read_text())
    path.write_text(wrong if isinstance(wrong, str) else json.dumps({**known, **wrong}))
    for command in ("scancel", "squeue", "sacct", "scontrol"):
        answers(folder, command, f"touch {folder}/called")
    for words in (["cancel", "mine"], ["logs", "mine"], ["runs", "runs"], ["status", "mine"]):
        shown = clipship(*words, code=0 if words[0] == "runs" else 2)
        assert "submission.json cannot be read" in shown.out + shown.err
    assert not (folder / "called").exists()


def test_the_output_of_another_user_is_not_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = folder / "secret"
    secret.write_text("a secret\n")
    submitted(folder, output=str(secret))
    assert clipship("logs", "mine", code=0).out == "[slurm] a secret\n"
    monkeypatch.setattr("trainer.launch.slurm.output._owner", lambda path: path == secret)
    captured = clipship("logs", "mine", code=2)
    assert "secret" not in captured.out
    assert "is not shown: it belongs to another user than the run" in captured.err


def sweep(*words: str, code: int = 0) -> Said:
    return clipship("sweep", "job.toml", *GRID, "--to", "slurm", *words, code=code)


def test_the_output_of_a_task_has_the_name_of_its_array(folder: Path) -> None:
    answers(folder, "sbatch", "echo 40")
    sweep("--set", "slurm.output=/out/%x-%A_%a.out")
    details = record_of(folder / "runs" / "mine-lr-3e-4-seed-1")["details"]
    assert details["output"] == "/out/mine-sweep-1-40_3.out", "where Slurm writes it"


def test_runs_that_ask_slurm_for_different_things_are_several_arrays(folder: Path) -> None:
    answers(folder, "sbatch", f"echo x >>{folder}/called; /usr/bin/wc -l <{folder}/called")
    grid = ["--grid", "seed=0,1", "--grid", "resources.nodes=1,2,4"]
    _, out, err = clipship("sweep", "job.toml", *grid, "--to", "slurm", code=0)
    assert out.split() == ["1_0", "1_1", "2_0", "2_1", "3_0", "3_1"]
    assert "at a time" not in err
    chains = ["--set", "name=chains", "--set", "slurm.array=1-3%1"]
    out = clipship("sweep", "job.toml", *grid, *chains, "--to", "slurm", code=0).out
    assert out.split() == ["4", "5", "6", "7", "8", "9"]


def test_tasks_without_a_record_are_named_and_do_not_hide_the_others(folder: Path) -> None:
    run = folder / "runs" / "mine-lr-3e-4-seed-0"
    answers(folder, "sbatch", f"/usr/bin/mkdir {run}/artefacts/submission.json; echo 40")
    _, out, err = sweep(code=1)
    assert out.split() == ["40_0", "40_1", "40_2", "40_3"]
    assert err.count("the record of it cannot be written") == 1
    assert "To end it: scancel 40_2" in err
    assert "1 run of these has no record" in err
    assert (run / "artefacts" / "train.sbatch").is_file()
    assert record_of(folder / "runs" / "mine-lr-3e-4-seed-1")


def test_several_arrays_say_how_many_runs_run_at_a_time(folder: Path) -> None:
    answers(folder, "sbatch", "echo 40")
    grid = ["--grid", "seed=0,1,2", "--grid", "resources.nodes=1,2"]
    said = clipship("sweep", "job.toml", *grid, "--to", "slurm", "--parallel", "2", code=0).err
    assert "--parallel 2 holds for each array of Slurm, and these runs make 2" in said
    assert "up to 4 run at a time" in said


def test_a_sweep_that_slurm_refuses_leaves_no_record(folder: Path) -> None:
    answers(folder, "sbatch", "echo 'sbatch: error: invalid partition specified: gpux' >&2; exit 1")
    assert "0 runs of 4 submitted before this problem" in sweep(code=2).err
    assert not list(folder.glob("runs/*/artefacts/*.toml"))
    said = sweep("--set", "slurm.output=/x/%A.out", code=2).err
    assert "all runs of the sweep would write it; add %a or %j" in said


def test_a_sweep_whose_folder_cannot_be_written_is_refused_in_words(folder: Path) -> None:
    answers(folder, "sbatch", "echo 40")
    in_the_way = folder / "runs" / "mine-sweep" / "slurm"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    said = sweep(code=2).err
    assert f"{in_the_way}: File exists; choose another folder with --set logging.runs=FOLDER" in said
    assert "0 runs of 4 submitted before this problem" in said
    assert not list(folder.glob("runs/*/artefacts/*.toml"))
