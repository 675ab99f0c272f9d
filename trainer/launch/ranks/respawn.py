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
from trainer.sysinfo.signals import SIGNALS, reset_inherited_signals
from trainer.text.terminal import say
from trainer.world.restart_policy import FORGIVEN_S, KILLED, as_exit_code, in_a_row, left_by_itself
from trainer.world.variables import RESPAWNED


def main(arguments: Sequence[str]) -> int:
    """Runs a command, until it leaves by itself or the run has ended; returns its exit code.

    `arguments` are the run folder and the command's words.
    """
    run_folder, *command = arguments
    reset_inherited_signals()
    started: list[subprocess.Popen[bytes]] = []
    missed: list[int] = []
    _pass_signals_on(started, missed)
    deaths, environment = 0, dict(os.environ)
    while True:
        began = time.monotonic()
        process = subprocess.Popen(command, env=environment)
        started.append(process)
        while missed:  # they came before there was a process to pass them on to
            process.send_signal(missed.pop(0))
        code = process.wait()
        started.clear()
        # one that a request to stop killed had only just started
        if left_by_itself(code, over_ssh=False) or -code in SIGNALS or Path(run_folder, EXIT_FILE).exists():
            return as_exit_code(code)
        deaths = in_a_row(deaths, progress=time.monotonic() - began > FORGIVEN_S)
        wait_s = KILLED.wait_s(deaths)
        node = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
        say(f"a supervisor on {node} was killed; it is started again in {wait_s:.0f} s")
        time.sleep(wait_s)
        environment[RESPAWNED] = "1"


def _pass_signals_on(started: "Sequence[subprocess.Popen[bytes]]", missed: list[int]) -> None:
    """Passes requests to stop on: under proctrack/cgroup, Slurm signals the first process of a task alone."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if not started:
            missed.append(number)
        for process in started:
            process.send_signal(number)

    for number in SIGNALS:
        signal.signal(number, pass_on)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
