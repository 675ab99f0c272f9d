"""Runs a command in a terminal, as a person does, and keeps what it shows."""

import errno
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from typing import Any

END_S = 120.0
REPEAT_S = 5.0
"""Signals within this time are one request, as schedulers repeat themselves."""
_ERASE = "\x1b[K"


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class LostConsole(io.StringIO):
    """Nothing can be written there: the disk behind it is full, or its reader has left."""

    def __init__(self, number: int = errno.ENOSPC) -> None:
        super().__init__()
        self._number = number
        self.lost = ""
        """Text that was to be written."""

    def write(self, text: str) -> int:
        self.lost += text
        raise OSError(self._number, os.strerror(self._number))


class Terminal:
    """A terminal in which a command runs in the foreground."""

    def __init__(self, command: list[str], columns: int = 0, **options: Any) -> None:
        """`columns` is its width, 0 for a terminal that does not say; options are those of Popen."""
        self._screen, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24 * bool(columns), columns, 0, 0))

        self.process = subprocess.Popen(
            command,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            preexec_fn=_take_terminal,
            **options,
        )
        os.close(inside)
        self.text = ""
        self._is_closed = False

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
        while not self._is_closed and self._read(2.0):  # one read gives no more than 4 KiB
            pass
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            time.sleep(REPEAT_S + 1)
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(END_S)
        os.close(self._screen)

    def lines(self) -> list[str]:
        """Returns the lines as they stay on the screen: what was written over is gone."""
        return [_screen_line(line.rstrip("\r")) for line in self.text.split("\n")]

    def _read(self, wait_s: float) -> bool:
        """Reads what is shown within the time; returns whether that is anything."""
        if select.select([self._screen], [], [], wait_s)[0]:
            try:
                self.text += os.read(self._screen, 65536).decode(errors="replace")
            except OSError:  # the other side is closed
                self._is_closed = True
                time.sleep(min(wait_s, 0.01))
            else:
                return True
        return False


def _screen_line(written: str) -> str:
    """Returns what a line shows after carriage returns and erasures to its end."""
    shown = ""
    for part in written.split("\r"):
        text = part.replace(_ERASE, "")
        shown = text + ("" if _ERASE in part else shown[len(text) :])
    return shown
