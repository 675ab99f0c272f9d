"""A command's exit code is its own, whatever becomes of its streams, and its text is UTF-8 in any locale."""

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
