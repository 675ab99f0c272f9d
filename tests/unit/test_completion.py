"""What helps at a prompt: completion in the shell, and `clipship explain` of keys and sections."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    assert completed(tmp_path, "clipship", "report", "other-run", "fi") == ["first-run"]
    assert completed(tmp_path, "clipship", "explain", "comm.nccl") == [
        "comm.nccl",
        "comm.nccl.ib_hca",
        "comm.nccl.socket_ifname",
    ]


def test_each_shell_has_a_script() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert f"_CLIPSHIP_COMPLETE={shell}_complete" in clipship("completion", shell, code=0).out


def keys(schema: dict[str, Any], section: str = "") -> list[str]:
    found = []
    for name, place in schema["properties"].items():
        found += [section + name, *(keys(place, f"{section}{name}.") if "properties" in place else [])]
    return found


@pytest.mark.parametrize("columns", [60, 200, pytest.param(80, marks=pytest.mark.full)])
def test_every_key_and_section_is_explained_within_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for key in ["", *keys(json.loads(clipship("explain", "", "--json").out))]:
        shown = clipship("explain", key)
        assert shown.code == 0, key
        assert max(map(len, shown.out.splitlines())) <= columns, key


def test_key_has_its_type_default_range_unit_and_rule_of_resumed_runs() -> None:
    assert clipship("explain", "recovery.min_nodes").out.splitlines()[-6:] == [
        "",
        "  - whole number, at least 1",
        "  - in nodes",
        "  - default not set",
        "  - a resumed run may change it",
        "  - see also: resources.nodes",
    ]


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        *(("optim.learning_rate", ""), ("optim.warmup", "optim.warmup_steps"), ("lrr", "optim.lr")),
        *((".", "`clipship explain` lists the sections"), ("xyzzy", "")),
    ],
)
def test_unknown_key_names_near_ones(wrong: str, near: str) -> None:
    code, _, why = clipship("explain", wrong)
    assert code == 2
    assert f"the job file has no key {wrong}: " in why
    assert near in why
