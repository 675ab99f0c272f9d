"""Turns a fork of a warm interpreter into the process that was asked for, and ends it."""

import atexit
import fcntl
import io
import os
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType

import huggingface_hub.constants
import numpy as np
import torch

from tests.support.warm import process_image
from tests.support.warm.request import Request

HIGH = 1000
"""Descriptors that a process should not notice get numbers from here on."""


def take(request: Request, descriptors: Sequence[int], path: Sequence[str]) -> None:
    """Gives this process all that a new one has, and lets the one go on that waits for it.

    `path` is the search path without PYTHONPATH.
    """
    waiting = _place(descriptors, request.places)
    os.environ.clear()
    os.environ.update(request.env)
    process_image.show(request.command, request.env)
    request.take()
    _open_streams(unbuffered=bool(request.env.get("PYTHONUNBUFFERED")))
    _search(request, path)
    _read_again(request.env)
    os.close(waiting)


def run(request: Request) -> None:
    """Runs the module as `python -m` does.

    A rank then ends as every interpreter, libraries and all. Others would not have imported torch, whose
    modules take a third of a second to tidy up: they leave that to the kernel.
    """
    sys.modules.pop(request.module, None)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    try:
        runpy._run_module_as_main(request.module)  # type: ignore[attr-defined]
    except BaseException as end:
        if not request.starts_others:
            raise
        _leave(_code_of(end))
    if request.starts_others:
        _leave(0)


def _place(descriptors: Sequence[int], places: Sequence[int]) -> int:
    """Moves each descriptor to its place; returns the new number of the last one, which has none."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH) for number in descriptors]
    for number in descriptors:
        os.close(number)
    for number, place in zip(high, places, strict=False):
        os.dup2(number, place)
    for number in high[:-1]:
        os.close(number)
    return high[-1]


def _open_streams(*, unbuffered: bool) -> None:
    """Opens them as Python does where it begins."""
    old = sys.__stdout__
    assert old is not None
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = os.fdopen(number, "wb" if number else "rb", 0 if number and unbuffered else -1, closefd=False)
        stream = io.TextIOWrapper(
            raw,
            encoding=old.encoding,
            errors="backslashreplace" if name == "stderr" else old.errors,
            newline="\n" if number else None,
            line_buffering=not unbuffered and (name == "stderr" or os.isatty(number)),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _search(request: Request, path: Sequence[str]) -> None:
    folders = [folder for folder in request.env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [*([] if request.safe_path else [os.getcwd()]), *folders, *path]
    sys.argv[:] = ["-m", *request.words]
    sys.orig_argv[:] = request.command


def _read_again(env: Mapping[str, str]) -> None:
    """Lets libraries have what they took from the environment, or from chance, when they were imported."""
    np.random.seed()
    tempfile.tempdir = None
    huggingface_hub.constants.HF_HUB_OFFLINE = env.get("HF_HUB_OFFLINE") == "1"
    threads = int(env.get("OMP_NUM_THREADS") or 0)
    if threads and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _code_of(end: BaseException) -> int:
    """Returns the exit code, minus the number of a signal; says why, as the interpreter does."""
    if not isinstance(end, SystemExit):
        sys.excepthook(type(end), end, end.__traceback__)
        return -signal.SIGINT if isinstance(end, KeyboardInterrupt) else 1
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _leave(code: int) -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)
