"""A rank imports without Python's garbage collector, and has it while it works."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import gc
import sys
from trainer.world.console import exit_now, run_rank

print(gc.isenabled(), gc.get_freeze_count())

def work(world, heartbeat):
    print(gc.isenabled(), gc.get_freeze_count() > 10_000)

exit_now(run_rank(sys.stderr, work))
"""
ROOT = Path(__file__).parents[2]


def test_the_collector_is_off_for_a_ranks_imports_and_on_for_its_work(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "trainer.supervise.rank.rank_start", "worker"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "False 0\nTrue True\n"
