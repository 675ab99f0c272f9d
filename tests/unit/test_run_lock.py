"""The lock of a run folder, between real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.errors import InputError, Unfit
from trainer.inputs.run_folder import move_aside
from trainer.run_lock import LOCK, hold, who_holds

HOLDER = """
import sys, time
from pathlib import Path
from trainer.run_lock import hold
hold(Path(sys.argv[1]), "n1", 1.0, print)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def other_start(folder: Path, seconds: float = 600.0) -> "subprocess.Popen[bytes]":
    """A process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), str(seconds)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_another_start_is_refused_by_name_until_the_first_is_killed(tmp_path: Path) -> None:
    said: list[str] = []
    with other_start(tmp_path) as other:
        words = f"is written by process {other.pid} on n1 since 20"
        with pytest.raises(Unfit, match=words):
            hold(tmp_path, "n2", 0.3, said.append)
        assert len(said) == 1
        assert words in said[0]
        assert (who_holds(tmp_path) or "").startswith(f"process {other.pid} on n1")
        with pytest.raises(InputError, match="cannot be set aside: it is written by process"):
            move_aside(tmp_path)
        other.kill()
    assert who_holds(tmp_path) is None
    hold(tmp_path, "n2", 0.0, said.append)
    assert len(said) == 1


def test_a_start_waits_for_the_end_of_the_one_before(tmp_path: Path) -> None:
    said: list[str] = []
    with other_start(tmp_path, 1.0):
        hold(tmp_path, "n1", 60.0, said.append)
    assert len(said) == 1
    assert '"process": ' in (tmp_path / LOCK).read_text()


def test_a_folder_that_was_never_locked_is_nobodys(tmp_path: Path) -> None:
    assert who_holds(tmp_path) is None
    assert not (tmp_path / LOCK).exists()
