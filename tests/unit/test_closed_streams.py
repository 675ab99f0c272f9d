"""A command's exit code is its own, whatever becomes of its streams; its text suits locale and terminal."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.config.loader import dump_job

CLIPSHIP = [sys.executable, "-m", "trainer.cli"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_has_gone_changes_no_exit_code(stream: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as nobody:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: nobody}
        shown = subprocess.run([*CLIPSHIP, "stacks"], **pipes)
        refused = subprocess.run([*CLIPSHIP, "check", "no-such-job.toml"], **pipes)
    assert (shown.returncode, refused.returncode) == (0, 2)


@pytest.mark.skipif(shutil.which("localedef") is None, reason="no localedef here")
def test_a_run_with_closed_streams_in_a_latin_1_locale_ends_well(tmp_path: Path) -> None:
    made = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(tmp_path / "en_US.ISO-8859-1")]
    subprocess.run(made, capture_output=True, check=True)
    job = tiny_job(name="猫咪", logging={"runs": str(tmp_path / "runs"), "tensorboard": False})
    (tmp_path / "job.toml").write_text(dump_job(job), encoding="utf-8")
    env = {**os.environ, "LOCPATH": str(tmp_path), "LC_ALL": "en_US.ISO-8859-1"}
    env.pop("PYTHONUTF8", None)
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *CLIPSHIP, "run", str(tmp_path / "job.toml")]
    code = subprocess.run(command, env=env).returncode
    result = json.loads((tmp_path / "runs" / "猫咪" / "result.json").read_text())
    assert (code, result["reason"]) == (0, "done")


def test_a_signal_while_a_line_is_written_does_not_write_it_twice() -> None:
    program = (
        "import itertools, signal\n"
        "from trainer.sysinfo.streams import outlive_readers\n"
        "def press(*_): raise KeyboardInterrupt\n"
        "signal.signal(signal.SIGALRM, press)\n"
        "outlive_readers()\n"
        "for number in range(3000):\n"
        "    try:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number % 60))\n"
        "        for part in itertools.count():\n"
        '            print(f"{number} {part}\\n", end="", flush=True)\n'
        "    except KeyboardInterrupt:\n"
        "        pass\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) > 3000
    assert len(set(lines)) == len(lines)


_INTERRUPTED_IMPORT = """\
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "trainer.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from trainer.cli.entry import main
sys.exit(main())
"""


_ESCAPE_PRINTED = """\
import sys
from trainer.cli import entry, main as command_line
command_line.main = lambda: print("d\\udcff") or 0
sys.exit(entry.main())
"""


def test_ctrl_c_during_the_imports_leaves_no_traceback() -> None:
    end = subprocess.run([sys.executable, "-c", _INTERRUPTED_IMPORT], capture_output=True, text=True)
    assert (end.returncode, end.stderr) == (130, "")


def test_a_name_that_is_no_utf_8_keeps_its_bytes_where_the_locale_passes_them() -> None:
    end = subprocess.run([sys.executable, "-c", _ESCAPE_PRINTED], env={"LC_ALL": "C"}, capture_output=True)
    assert end.stdout == b"d\xff\n", end.stderr


def test_what_the_terminals_encoding_lacks_is_escaped() -> None:
    printing = _ESCAPE_PRINTED.replace("\\udcff", "\\u8bad")
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    end = subprocess.run([sys.executable, "-c", printing], env=environment, capture_output=True)
    assert end.stdout == rb"d\u8bad" + b"\n", end.stderr
