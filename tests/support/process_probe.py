"""Prints what a process has from the one that started it, as JSON; `end WORD` ends it in one of many ways."""

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

_PR_GET_PDEATHSIG = 2  # linux/prctl.h

_OF_THREADS = 0b11 << 31
"""Signals that the C library takes for itself once a process has had a thread (nptl(7))."""


def seen() -> dict[str, Any]:
    """Returns it, but for what differs between any two processes."""
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(death))
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "argv": sys.argv,
        "path": sys.path,
        "orig_argv": sys.orig_argv,
        "command line": Path("/proc/self/cmdline").read_text().split("\0"),
        "environ of the kernel": sorted(Path("/proc/self/environ").read_text().split("\0")),
        "environ": dict(os.environ),
        "module": __spec__.name,
        "folder": os.getcwd(),
        "umask": status["Umask"],
        "signals": {name: int(status[name], 16) & ~_OF_THREADS for name in ("SigBlk", "SigIgn", "SigCgt")},
        "parent": os.getppid(),
        "leads": (os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()),
        "group": os.getpgrp() if os.getpgrp() != os.getpid() else 0,
        "death of the parent": death.value,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "descriptors": sorted(number for number in range(256) if _is_open(number)),
        "streams": [
            (file.encoding, file.errors, file.line_buffering, file.write_through)  # type: ignore[union-attr]
            for file in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "threads": len(os.listdir("/proc/self/task")),
    }


def _is_open(number: int) -> bool:
    try:
        return not os.readlink(f"/proc/self/fd/{number}").startswith(("/proc/", "anon_inode:"))
    except OSError:
        return False


def end(how: str) -> None:
    match how:
        case "code":
            sys.exit(7)
        case "words":
            sys.exit("told to leave")
        case "raise":
            raise ValueError("told to fail")
        case "interrupt":
            signal.raise_signal(signal.SIGINT)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1:2] == ["end"]:
        print("the end begins")
        end(sys.argv[2])
    else:
        print(json.dumps(seen()))
