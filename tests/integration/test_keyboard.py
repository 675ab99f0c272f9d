"""Ctrl-C at a real terminal, on a real run of two ranks.

In every part of a run's life, the terminal shows at once what happens next.
"""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.ends import write_job
from trainer.supervise.stopping import REPEAT_S

AT_ONCE_S = 2.0
"""Limit for an answer to a key. One that waits for no rank or supervisor takes milliseconds."""
END_S = 120.0
CTRL_C = b"\x03"


class Terminal:
    """A terminal in which a command runs in the foreground."""

    def __init__(self, command: list[str]) -> None:
        self._screen, inside = pty.openpty()

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(inside)
        self.text = ""

    def press(self, key: bytes) -> None:
        os.write(self._screen, key)

    def shows(self, pattern: str, within_s: float) -> re.Match[str]:
        """Waits until the pattern is in the text shown since the start, and returns the match."""
        limit = time.monotonic() + within_s
        while not (found := re.search(pattern, self.text)):
            self._read(0.01)
            assert time.monotonic() < limit, f"no {pattern!r} in\n{self.text}"
        return found

    def until(self, so: Callable[[], object], within_s: float = END_S) -> None:
        limit = time.monotonic() + within_s
        while not so():
            self._read(0.01)
            assert time.monotonic() < limit, self.text

    def end(self) -> int:
        self.until(lambda: self.process.poll() is not None)
        self._read(0.1)
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            time.sleep(REPEAT_S + 1)
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(END_S)
        os.close(self._screen)

    def _read(self, wait_s: float) -> None:
        if select.select([self._screen], [], [], wait_s)[0]:
            try:
                self.text += os.read(self._screen, 65536).decode(errors="replace")
            except OSError:  # the other side is closed
                time.sleep(wait_s)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def begin(fault: str = "", **sections: object) -> Terminal:
        job = write_job(tmp_path, "torch", "clipship", fault, steps=100_000, **sections)
        module = (
            ["tests.support.ends", str(job), "2"]
            if fault
            else ["trainer.cli.main", "run", str(job), "--nproc", "2"]
        )
        opened.append(Terminal([sys.executable, "-m", *module]))
        return opened[-1]

    yield begin
    for terminal in opened:
        terminal.close()


def steps_logged(tmp_path: Path) -> int:
    metrics = tmp_path / "runs" / "ends" / "metrics.jsonl"
    return metrics.read_text().count('"loss"') if metrics.exists() else 0


def test_ctrl_c_says_at_which_step_the_run_saves_and_leaves(
    tmp_path: Path, start: Callable[..., Terminal]
) -> None:
    terminal = start(checkpoint={"every_steps": 1000})
    terminal.until(lambda: steps_logged(tmp_path) > 3)
    terminal.press(CTRL_C)
    pattern = (
        r"Ctrl-C in (?:the \w+ of )?step (\d+): saving at about step (\d+), then exiting; "
        r"press Ctrl-C again to exit at once"
    )
    said = terminal.shows(pattern, AT_ONCE_S)
    assert terminal.end() == 75, terminal.text
    saved = int(terminal.shows(r"asked to stop: step (\d+) of", 1)[1])
    assert int(said[1]) <= saved <= int(said[2]) + 1
    assert (tmp_path / "runs" / "ends" / "checkpoints" / f"step-{saved:08d}").is_dir()


def children(process: int) -> str:
    return Path(f"/proc/{process}/task/{process}/children").read_text()


@pytest.mark.parametrize("moment", ["launcher", "ranks"])
def test_ctrl_c_before_the_first_step_leaves_with_nothing_saved(
    tmp_path: Path, start: Callable[..., Terminal], moment: str
) -> None:
    terminal = start()
    if moment == "launcher":
        terminal.until(lambda: children(terminal.process.pid))
    else:
        terminal.shows("world  ", END_S)
    terminal.press(CTRL_C)
    terminal.shows("Ctrl-C before the first step is done: there is nothing to save, exiting", AT_ONCE_S)
    assert terminal.end() in ((75,) if moment == "ranks" else (75, 130)), terminal.text
    assert not steps_logged(tmp_path)


def test_ctrl_c_twice_leaves_at_once_though_a_checkpoint_is_being_saved(
    tmp_path: Path, start: Callable[..., Terminal]
) -> None:
    terminal = start("slow:1:checkpoint:2", timeouts={"checkpoint_s": 500.0})
    terminal.until((tmp_path / "moment").exists)
    terminal.press(CTRL_C)
    terminal.shows(
        r"Ctrl-C in (the checkpoint of )?step 2: saving at about step 4, then exiting; press Ctrl-C again",
        AT_ONCE_S,
    )
    terminal.press(CTRL_C)
    terminal.shows("Ctrl-C again: exiting at once, nothing more is saved", AT_ONCE_S)
    assert terminal.end() == 128 + signal.SIGINT, terminal.text
