"""Standard streams and the encoding of text, whatever the shell, the locale and the reader make of them."""

import io
import locale
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

_UTF8 = "PYTHONUTF8"


def use_streams() -> None:
    """Opens streams that the shell has closed (`>&-`), and makes UTF-8 the encoding of all text.

    Both hold for the processes that this one starts, too. Where the locale has another encoding, the program
    starts again: Python chooses its encoding before anything of ours runs.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    if locale.getpreferredencoding(False).lower() not in ("utf-8", "utf8") and _UTF8 not in os.environ:
        os.environ[_UTF8] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class _Lasting(io.BufferedWriter):
    """Buffer of a stream; once its reader has gone, what is written is lost.

    A disk that is full raises once, and not again when the interpreter ends. The raw file stays Python's own:
    a signal that comes between its write and the buffer's note of it would have it written twice.
    """

    reader_gone = False

    def write(self, content: Any) -> int:
        self._try(super().write, content)
        return len(content)

    def flush(self) -> None:
        self._try(super().flush)

    def _try(self, deed: Callable[..., object], *given: Any) -> None:
        try:
            deed(*given)
        except OSError as problem:
            self.reader_gone = True
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            if not isinstance(problem, BrokenPipeError):
                raise


def outlive_readers() -> None:
    """Lets the readers of stdout and stderr go away: that ends nothing and changes no exit code."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream, buffer = getattr(sys, name), _Lasting(io.FileIO(number, "w", closefd=False))
        at_once = stream.line_buffering or stream.write_through  # the latter by PYTHONUNBUFFERED
        errors = "backslashreplace" if stream.errors == "strict" else stream.errors
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, errors, line_buffering=at_once))


def reader_is_gone(stream: TextIO) -> bool:
    """Returns whether nobody reads one of these streams any more."""
    return bool(getattr(getattr(stream, "buffer", None), "reader_gone", False))
