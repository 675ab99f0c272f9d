"""An interpreter that has imported its modules already, and forks for each program.

A program that runs so is a process of its own, in which nothing of the tests is imported, and saves the
seconds of processor time that a start of torch and open_clip takes.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.pages import ROOT

_SERVER = """
import importlib, json, os, sys, traceback

def child(program, words, folder, environment, files):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *words]
    for number, name in enumerate((os.devnull, *files)):
        os.dup2(os.open(name, os.O_RDWR), number)
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    asked = json.loads(line)
    if not (number := os.fork()):
        code = child(**asked)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), flush=True)
"""


class Ready:
    """The interpreter; `run` is subprocess.run with a program for `-c`.

    No hub can be reached from it, and its cache is empty.
    """

    def __init__(self, *modules: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="clipship-ready-")
        self._environment = {
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "HF_HOME": self._folder.name,
        }
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **self._environment},
        )

    def run(self, program: str, *words: str, folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
        """Runs a program with words behind its name; returns what it printed, and its exit code."""
        files = [Path(self._folder.name, name) for name in ("out", "err")]
        for file in files:
            file.write_text("")
        asked = {
            "program": program,
            "words": words,
            "folder": str(folder),
            "environment": {**os.environ, **self._environment},
            "files": [str(file) for file in files],
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(asked), file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(["-c", *words], code, *(file.read_text() for file in files))

    def close(self) -> None:
        self._server.communicate()
        self._folder.cleanup()


@functools.cache
def ready(*modules: str) -> Ready:
    """Returns the one interpreter of this process with these modules; it ends with the process."""
    interpreter = Ready(*modules)
    atexit.register(interpreter.close)
    return interpreter


def models() -> Ready:
    """Returns an interpreter with what makes models, and without Clipship."""
    return ready("torch", "open_clip", "transformers.models.auto", "transformers.models.clip")
