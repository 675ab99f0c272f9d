"""Completion in the shell: click's scripts, and the keys and runs that they suggest."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.command_line import clipship

BASH = """
source "$SCRIPT"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_clipship_completion "$ASKED" 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(folder: Path, *words: str) -> list[str]:
    """Returns what bash would suggest for the last of the words."""
    script = folder / "script"
    script.write_text(clipship("completion", "bash").out)
    asked = folder / "clipship"
    asked.write_text(f"#!/bin/sh\nexec {sys.executable} -m trainer.cli\n")
    asked.chmod(0o755)
    environment = {**os.environ, "SCRIPT": str(script), "ASKED": str(asked)}
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", *words],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=60,
    )
    return done.stdout.split()


def test_bash_completes_commands_presets_keys_values_and_runs(tmp_path: Path) -> None:
    (tmp_path / "runs" / "first-run").mkdir(parents=True)
    (tmp_path / "runs" / "first-run" / "job.toml").touch()
    (tmp_path / "runs" / "other").mkdir()
    assert completed(tmp_path, "clipship", "expl") == ["explain"]
    assert "laptop" in completed(tmp_path, "clipship", "init", "--preset", "")
    assert completed(tmp_path, "clipship", "run", "--set", "optim.lr") == ["optim.lr="]
    assert "model.precision=bf16" in completed(tmp_path, "clipship", "run", "--set", "model.precision=b")
    assert completed(tmp_path, "clipship", "status", "fi") == ["first-run"]
    assert completed(tmp_path, "clipship", "eval", "fi") == ["first-run"]
    assert completed(tmp_path, "clipship", "export", "fi") == ["first-run"]
    assert completed(tmp_path, "clipship", "report", "other-run", "fi") == ["first-run"]
    assert completed(tmp_path, "clipship", "explain", "comm.nccl") == [
        "comm.nccl",
        "comm.nccl.ib_hca",
        "comm.nccl.socket_ifname",
    ]
