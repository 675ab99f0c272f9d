"""Runs a rank's supervisor, and starts it again if it is killed: it then joins the run, which has gone on.

Each task of srun runs `python -m trainer.launch.ranks.respawn RUN_FOLDER COMMAND ...`, so it must start at
once. No torch, no event loop.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from trainer.run.layout import EXIT_FILE
from trainer.sysinfo.signals import reset_inherited_signals
from trainer.world.rank_process import SIGNALS
from trainer.world.restart_policy import Deaths, as_exit_code, left_by_itself
from trainer.world.variables import RESPAWNED


class Respawned:
    """A supervisor that is started again; `run` is its whole life."""

    def __init__(self, run_folder: Path, command: Sequence[str]) -> None:
        self._run_folder, self._command = run_folder, command
        self._process: subprocess.Popen[bytes] | None = None
        # Under proctrack/cgroup, Slurm signals the first process of a task alone.
        for number in SIGNALS:
            signal.signal(number, self._pass_on)

    def run(self) -> int:
        """Starts the supervisor until it leaves by itself, or the run has ended; returns its exit code."""
        deaths, environment = Deaths(), dict(os.environ)
        while True:
            began = time.monotonic()
            self._process = subprocess.Popen(self._command, env=environment)
            code = self._process.wait()
            # one that a request to stop killed had only just started
            if left_by_itself(code, over_ssh=False) or -code in SIGNALS or self._has_ended():
                return as_exit_code(code)
            wait_s = deaths.wait_s(time.monotonic() - began)
            node = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
            line = f"clipship: a supervisor on {node} was killed; it is started again in {wait_s:.0f} s"
            print(line, file=sys.stderr, flush=True)
            time.sleep(wait_s)
            environment[RESPAWNED] = "1"

    def _has_ended(self) -> bool:
        return (self._run_folder / EXIT_FILE).exists()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if self._process is not None:
            self._process.send_signal(number)


def main(arguments: Sequence[str]) -> int:
    """Runs the command in `arguments` for the run folder before it; returns its exit code."""
    reset_inherited_signals()
    return Respawned(Path(arguments[0]), arguments[1:]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
