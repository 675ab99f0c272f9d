"""The limits of a job as a supervisor reads them, and what it does when they do not come."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import EXIT_FAILED, EXIT_PREEMPTED, MachineError, Preempted
from trainer.supervise import main
from trainer.supervise.limits import read_limits
from trainer.supervise.rank import rank_report


def _too_slow(arguments: Sequence[str]) -> dict[str, Any]:
    time.sleep(60.0)
    return {}


def _without_an_answer(arguments: Sequence[str]) -> dict[str, Any]:
    os._exit(9)


def _failing(arguments: Sequence[str]) -> dict[str, Any]:
    raise OSError(5, "Input/output error", "job.toml")


@pytest.mark.parametrize(
    ("read", "wait_s", "reason"),
    [
        (_too_slow, 0.1, r"not read within 0.1 s: start the run again"),
        (_without_an_answer, 60.0, r"ended without an answer \(code 9\)"),
        (_failing, 60.0, r"could not be read: OSError: \[Errno 5\] Input/output error: 'job.toml'"),
    ],
)
def test_limits_that_do_not_come_are_not_replaced_by_others(
    read: Any, wait_s: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.run.job_limits.limits_of_job", read)
    monkeypatch.setattr("trainer.supervise.limits.READ_S", wait_s)
    with pytest.raises(MachineError, match=reason):
        read_limits(["job.toml"])


def test_a_stop_is_heeded_although_the_job_file_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request comes while the file is waited for."""
    monkeypatch.setattr("trainer.run.job_limits.limits_of_job", _too_slow)
    monkeypatch.setattr("trainer.supervise.limits.ASKED_S", 0.1)
    asked: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _frame: asked.append(number))
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    try:
        with pytest.raises(Preempted, match="asked to stop before the job file was read"):
            read_limits(["job.toml"], asked)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(
    ("problem", "code", "said"),
    [
        (Preempted("asked to stop before it was read"), EXIT_PREEMPTED, "asked to stop before it was read"),
        (MachineError("not read: a reason"), EXIT_FAILED, "cannot be started: not read: a reason"),
    ],
)
def test_a_supervisor_without_limits_ends_with_a_sentence(
    problem: Exception,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ends(*_arguments: object, **_keys: object) -> int:
        raise problem

    monkeypatch.setattr(main, "supervise", ends)
    monkeypatch.setenv("CLIPSHIP_BEGAN", "1.0")  # else it stays set
    assert main.main(["job.toml"]) == code
    assert said in capsys.readouterr().err


def test_ras_is_asked_and_its_answer_kept() -> None:
    async def story() -> str:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"asked: " + await reader.readline())
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        found = await rank_report.ras_status(server.sockets[0].getsockname())
        server.close()
        return found

    assert asyncio.run(story()) == "asked: verbose status\n"
    assert asyncio.run(rank_report.ras_status(("127.0.0.1", 1))) == ""


def test_flight_record_is_asked_for_and_kept(tmp_path: Path) -> None:
    assert asyncio.run(rank_report.flight_record(tmp_path, tmp_path / "kept")) is None
    pipe = tmp_path / "nccl-pipe-3.pipe"
    os.mkfifo(pipe)
    listener = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "nccl-dump-3").write_bytes(b"record")
    kept = asyncio.run(rank_report.flight_record(tmp_path, tmp_path / "kept"))
    assert os.read(listener, 10) == b"1\n"
    os.close(listener)
    assert kept is not None
    assert kept.read_bytes() == b"record"
