"""Files of a run folder that others may have replaced: no command hangs, fails or reads without end."""

import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.command_line import clipship
from tests.support.report_folders import failed_run, long_run
from trainer.cli.main import main

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
