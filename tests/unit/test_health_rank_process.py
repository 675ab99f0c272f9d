"""The folder of a supervisor and its rank: what a killed supervisor leaves is swept by the next, what lives is not."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.health.rank_process import meeting_folder, sweep

HOLD = "import sys, time; from pathlib import Path; from trainer.health.rank_process import meeting_folder\n"
HOLD += "with meeting_folder(Path(sys.argv[1])) as folder: print(folder, flush=True); time.sleep(600)"


def hold(place: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has such a folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(place)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_killed_supervisors_folder_is_swept_and_a_living_ones_is_not(tmp_path: Path) -> None:
    process, folder = hold(tmp_path)
    with process:
        sweep(tmp_path)
        assert folder.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert folder.exists()
    with meeting_folder(tmp_path) as own:
        assert not folder.exists()
        assert own.exists()
    assert list(tmp_path.iterdir()) == []


def test_folder_without_lock_is_swept_only_when_it_is_old(tmp_path: Path) -> None:
    young, old = tmp_path / "clipship-rank-young", tmp_path / "clipship-rank-old"
    for folder in (young, old, tmp_path / "another"):
        folder.mkdir()
    os.utime(old, (time.time() - 3600,) * 2)
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "clipship-rank-young"]


def test_supervisors_that_start_together_sweep_nobody_away(tmp_path: Path) -> None:
    def start(_: int) -> bool:
        with meeting_folder(tmp_path) as folder:
            (folder / "pulse").touch()
            return (folder / "pulse").exists()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(start, range(400)))
