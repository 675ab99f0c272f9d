"""The lock of a run folder, between real processes."""

import asyncio
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.command_line import clipship
from tests.support.jobs import TOY_JOB, tiny_job
from tests.support.processes import ended_on_failure
from tests.support.report_folders import failed_run, long_run
from trainer.cli.main import main
from trainer.comm.protocol import Comm
from trainer.errors import MachineError, Preempted
from trainer.run.exit_files import ExitFiles, remove_other_exit_files
from trainer.run.lock import hold, who_holds
from trainer.train.run_folder import open_run

HOLDER = """
import sys, time
from pathlib import Path
from trainer.run.lock import hold
hold(Path(sys.argv[1]), sys.argv[2], "first", 1.0, print)
print("held", flush=True)
time.sleep(600)
"""


SEEN_BY_OTHERS = """
import sys
from pathlib import Path
from trainer.run.lock import who_holds
print(who_holds(Path(sys.argv[1])).node, who_holds(Path(sys.argv[1])).generation)
"""


@contextmanager
def other_start(folder: Path, node: str = "n1") -> "Iterator[subprocess.Popen[bytes]]":
    """A process that holds the folder."""
    command = [sys.executable, "-c", HOLDER, str(folder), node]
    with ended_on_failure(subprocess.Popen(command, stdout=subprocess.PIPE)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process


def test_later_generation_of_the_same_start_takes_the_lock_of_a_lost_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.run.lock.FENCED_S", 0.2)
    with other_start(tmp_path) as other:
        with pytest.raises(MachineError):
            hold(tmp_path, "n2", "first", 0.5, lambda _: None, generation=1)
        with pytest.raises(MachineError):
            hold(tmp_path, "n2", "second", 0.5, lambda _: None, generation=2)
        hold(tmp_path, "n2", "first", 60.0, lambda _: None, generation=2)
        command = [sys.executable, "-c", SEEN_BY_OTHERS, str(tmp_path)]
        assert subprocess.run(command, capture_output=True, text=True).stdout == "n2 2\n"
        other.kill()


def test_another_start_is_refused_by_name_until_the_first_is_killed(tmp_path: Path) -> None:
    said: list[str] = []
    assert who_holds(tmp_path) is None
    assert not (tmp_path / ".lock").exists()
    with other_start(tmp_path) as other:
        words = rf"process {other.pid} on n1 since 20\S+ is writing to .*{tmp_path.name}"
        with pytest.raises(MachineError, match=words):
            hold(tmp_path, "n2", "second", 0.3, said.append)
        assert len(said) == 1
        assert re.search(words, said[0])
        assert str(who_holds(tmp_path)).startswith(f"process {other.pid} on n1")
        (tmp_path / "job.toml").write_text(TOY_JOB.replace("toy", tmp_path.name))
        runs = ("--set", f"logging.runs={tmp_path.parent}")
        refused = clipship("run", tmp_path / "job.toml", "--nproc", "1", "--fresh", *runs, code=2)
        assert re.search(r"cannot be moved aside: process .* is writing to it", refused.err)
        other.kill()
    assert who_holds(tmp_path) is None
    hold(tmp_path, "n2", "second", 0.0, said.append)
    assert len(said) == 1


def test_a_second_start_on_the_same_machine_is_refused_at_once_by_process(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(f'{TOY_JOB}[logging]\nruns = "{tmp_path}"\n')
    (tmp_path / "toy").mkdir()
    with other_start(tmp_path / "toy", os.uname().nodename) as other:
        said = " ".join(clipship("run", tmp_path / "job.toml", "--nproc", "1", code=1).err.split())
        assert f"process {other.pid} on {os.uname().nodename} since 20" in said
        assert f"is writing to the run folder {tmp_path / 'toy'}: stop that start of the run first" in said
        other.kill()


def test_a_start_waits_for_the_end_of_the_one_before(tmp_path: Path) -> None:
    with other_start(tmp_path) as other:
        hold(tmp_path, "n1", "second", 60.0, lambda _: other.kill())
    assert '"start": "second"' in (tmp_path / ".lock").read_text()


def test_a_start_waits_no_longer_than_its_limit_allows(
    tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Most of init may be over already: the ranks came late, or their connections took long."""
    job = tiny_job(logging={"runs": str(tmp_path)}, timeouts={"init_s": 600.0})
    alone.heartbeat.limits = job.timeouts.by_phase
    monkeypatch.setattr(alone.heartbeat, "_began", time.monotonic() - 598)
    (tmp_path / job.name).mkdir()
    caplog.set_level("INFO")
    with other_start(tmp_path / job.name) as other:
        with pytest.raises(MachineError, match=f"process {other.pid}"):
            open_run(job, alone)
        other.kill()
    assert re.search(r"waiting up to [0-2] s for it to end", caplog.text)


def test_a_waiting_start_obeys_a_request_to_stop(tmp_path: Path) -> None:
    with other_start(tmp_path) as other:
        with pytest.raises(Preempted, match=f"asked to stop while process {other.pid} .* was writing to"):
            hold(tmp_path, "n2", "second", 600.0, lambda _: None, lambda: True)
        other.kill()


def test_only_the_start_that_holds_the_folder_writes_and_keeps_exit_files(tmp_path: Path) -> None:
    with other_start(tmp_path) as other:
        end = {"reason": "refused"}
        assert asyncio.run(ExitFiles(str(tmp_path), "second").write("exit.json", end)) == ""
        assert asyncio.run(ExitFiles(str(tmp_path), "first").write("exit.json", end)) == str(
            tmp_path / "exit.json"
        )
        asyncio.run(ExitFiles(str(tmp_path), "second").remove_old())
        assert (tmp_path / "exit.json").exists()
        other.kill()
    remove_other_exit_files(tmp_path, "first")
    assert (tmp_path / "exit.json").exists()
    remove_other_exit_files(tmp_path, "second")
    assert not (tmp_path / "exit.json").exists()


READER = """
import os, sys
from pathlib import Path
from trainer.run import lock

def stand_still(_):
    print("looks", flush=True)
    sys.stdin.read()

os.close = stand_still
lock.who_holds(Path(sys.argv[1]))
"""


def test_whoever_looks_at_the_lock_never_counts_as_its_holder(tmp_path: Path) -> None:
    """A reader that stands still in the midst of its look takes nothing, whoever held the folder last."""
    with other_start(tmp_path) as other:
        other.kill()
    command = [sys.executable, "-c", READER, str(tmp_path)]
    pipe = subprocess.PIPE
    with ended_on_failure(subprocess.Popen(command, stdin=pipe, stdout=pipe)) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"looks\n"
        assert who_holds(tmp_path) is None
        said: list[str] = []
        hold(tmp_path, "n2", "third", 0.0, said.append)
        assert not said
        reader.kill()


# Files of a run folder that others may have replaced: no command hangs, fails or reads without end.

Capture = pytest.CaptureFixture[str]
LIMIT_S = 20
"""Far more than any command takes here."""
CHECKPOINT = "checkpoints/step-0000000100"
LOG = "logs/rank-00000.log"
FILES = (
    "job.toml", "metrics.jsonl", "ranks.jsonl", "goodput.jsonl", "environment.json", "result.json",
    "exit.json", "diagnosis.json", "restarts.json", ".lock", ".start.json", "retrieval_board.json",
    "artefacts/submission.json", LOG, "evaluations/all.json", f"{CHECKPOINT}/manifest.json",
)  # fmt: skip
WRONG = {"exit_code": [], "reason": 5, "rank": {}, "to": 7, "job": 3, "files": 3, "restarts": [{"causes": 4}]}


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(20 * 2**30)


KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a link to what has no end": lambda path: path.symlink_to("/dev/zero"),
    "20 GB": lambda path: sparse(path) if path.suffix != ".log" else None,  # that is shown, part by part
    "a number": lambda path: path.write_text("5"),
    "depth": lambda path: path.write_text("[" * 100_000),
    "other types": lambda path: path.write_text(json.dumps(WRONG)),
}
COMMANDS = (
    ["status", "one"],
    ["status", "one", "--json"],
    ["report", "one"],
    ["diff", "one", "two"],
    ["logs", "one"],
    ["runs", "runs"],
    ["resume", "one"],
    ["cancel", "one"],
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainer.launch.local.run", lambda *_, **__: 0)
    for made in (
        failed_run(tmp_path / "runs" / "one", name="one"),
        long_run(tmp_path / "runs" / "two", steps=40),
    ):
        (made / CHECKPOINT).mkdir(parents=True)
        (made / CHECKPOINT / "manifest.json").write_text('{"step": 100}')
    return tmp_path / "runs"


@pytest.fixture
def soon() -> Iterator[None]:
    """Ends a test that waits, from whatever call it waits in."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["pairs", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_strange_file_stops_no_command(
    runs: Path, soon: None, capsys: Capture, kind: str, every: bool
) -> None:
    """Each command meets each file; the kinds of files take turns, and `full` tries all of each."""
    turn = list(KINDS).index(kind)
    for number, name in enumerate(FILES):
        path = runs / "one" / name
        content = path.read_bytes() if path.exists() else None
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        KINDS[kind](path)
        for place, command in enumerate(COMMANDS):
            if not every and (number + place) % len(KINDS) != turn:
                continue
            signal.alarm(LIMIT_S)
            assert main(command) in (0, 1, 2), (name, command)
            assert "Traceback (most" not in capsys.readouterr().err, (name, command)
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("exit.json", '{"exit_code": 1, "time": "yesterday"}'),
        ("exit.json", '{"exit_code": 1, "time": 1e300}'),
        ("environment.json", r'[{"rank": "0", "node": "\ud800"}]'),
        ("restarts.json", f'{{"restarts": [{{"generation": 2, "seconds": 1{"0" * 400}}}]}}'),
        ("result.json", '{"reason": "done", "seconds": NaN}'),
        ("job.toml", 'name = "one"\noptim = 5\n'),
        ("job.toml", 'name = "one"\n[optim]\nglobal_batch_size = [1]\n'),
    ],
)
def test_a_strange_value_stops_no_command(runs: Path, capsys: Capture, name: str, text: str) -> None:
    (runs / "one" / name).write_text(text)
    for command in (["status", "one", "--json"], ["report", "one", "two"], ["diff", "one", "two"]):
        assert main(command) in (0, 1), command
    assert "Traceback (most" not in capsys.readouterr().err


def test_what_is_no_plain_file_is_named_where_it_is_left_out(runs: Path, soon: None) -> None:
    signal.alarm(LIMIT_S)
    (runs / "one" / "exit.json").unlink()
    os.mkfifo(runs / "one" / "exit.json")
    log = runs / "one" / LOG
    log.unlink()
    log.symlink_to("/etc/passwd")
    assert (
        "exit.json cannot be read: it is no plain file"
        in json.loads(clipship("status", "one", "--json", code=0).out)["remarks"]
    )
    captured = clipship("logs", "one", code=0)
    assert "root:" not in captured.out
    assert f"{log.relative_to(runs.parent)} is left out: it is a link" in captured.err


@pytest.mark.parametrize("name", ["job.toml", "metrics.jsonl", ".lock"])
@pytest.mark.parametrize("kind", ["a FIFO", "a link to what has no end"])
def test_a_start_names_what_is_no_plain_file(runs: Path, soon: None, name: str, kind: str) -> None:
    signal.alarm(LIMIT_S)
    Path("job.toml").write_text((runs / "one" / "job.toml").read_text())
    (runs / "one" / name).unlink(missing_ok=True)
    KINDS[kind](runs / "one" / name)
    assert f"one/{name} is a link or no file" in clipship("run", "job.toml", "--nproc", "1", code=2).err


@pytest.mark.parametrize("command", ["status", "report", "resume", "eval"])
def test_a_run_of_another_user_that_may_not_be_entered_is_named(
    runs: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The user of these tests may be root, who enters every folder."""
    stat, closed = os.stat, runs / "closed" / "run"

    def denied(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(closed)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", denied)
    assert f"{closed}" in (said := clipship(command, closed, code=2).err)
    assert said.rstrip().endswith("Permission denied")


def test_a_job_file_may_be_a_link_and_no_fifo(tmp_path: Path, runs: Path, soon: None) -> None:
    signal.alarm(LIMIT_S)
    (tmp_path / "link.toml").symlink_to(runs / "one" / "job.toml")
    clipship("check", "link.toml", code=0)
    os.mkfifo(tmp_path / "fifo.toml")
    assert "fifo.toml: cannot be read: it is no plain file" in clipship("check", "fifo.toml", code=2).err


def test_large_logs_are_merged_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    """In the order of their ranks' numbers at one time; rank-1.log is no rank's."""
    monkeypatch.setattr("trainer.launch.logfiles._AT_ONCE", 100)
    monkeypatch.setattr("trainer.launch.logfiles._LONGEST", 500)
    (tmp_path / "logs").mkdir()
    (tmp_path / "job.toml").touch()
    (tmp_path / "logs" / "rank-1.log").write_text("2026-01-02 03:04:05,000 INFO step of nobody\n")
    ranks = (0, 2, 100_000)
    for rank in ranks:
        lines = [f"2026-01-02 03:04:{second:02},000 INFO step of {rank}\n  more" for second in range(60)]
        (tmp_path / "logs" / f"rank-{rank:05d}.log").write_text("\n".join(lines) + "\n" + "x" * 2000)
    shown = clipship("logs", tmp_path, code=0).out.splitlines()
    steps = [line for line in shown if "step" in line]
    assert [line.rpartition(" ")[2] for line in steps] == [str(rank) for rank in ranks] * 60
    assert len([line for line in shown if "x" * 100 in line]) > 3  # a line without end is not kept whole
