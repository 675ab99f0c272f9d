"""The real trainer, one rank of which does something bad at a given moment.

`FAULT` says what: DEED:RANK:PHASE:STEP, from the job's [env]. `python -m tests.integration.faulty_rank JOB` is a supervisor and its rank,
as `python -m trainer.rank JOB` is. Deeds: kill, stop (SIGSTOP), slow (sleeps for good), raise, exit (code 7), freeze (its supervisor too),
orphan (kills its supervisor), signal (SIGUSR2 to its supervisor), signal-all (so does every rank), term (SIGTERM to its supervisor).
"""

import os
import signal
import sys
import time
from pathlib import Path

from trainer import rank
from trainer.health.pulse import RANK_DIR, Phase, Pulse
from trainer.world import detect

MOMENT = "FAULT_MOMENT"
"""A file that gets the time at which the fault happened."""


def install(fault: str) -> None:
    """From now on, entering the phase at the step is the fault's moment."""
    deed, victim, phase, step = fault.split(":")
    here = detect(os.environ, os.uname().nodename).rank
    enter = Pulse.phase

    def fall(self: Pulse, entered: Phase, at: int = 0) -> None:
        enter(self, entered, at)
        if (entered, str(at)) == (phase, step) and (str(here) == victim or deed == "signal-all"):
            commit(deed)

    Pulse.phase = fall  # type: ignore[method-assign, assignment]


def commit(deed: str) -> None:
    if file := os.environ.get(MOMENT):
        Path(file).write_text(str(time.time()))
    match deed:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "freeze":
            os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        case "orphan":
            os.kill(os.getppid(), signal.SIGKILL)
        case "slow":
            time.sleep(600)
        case "raise":
            raise ValueError("a fault of the test")
        case "exit":
            os._exit(7)
        case "signal" | "signal-all":
            os.kill(os.getppid(), signal.SIGUSR2)
        case "term":
            os.kill(os.getppid(), signal.SIGTERM)


if __name__ == "__main__":
    if RANK_DIR in os.environ:
        from trainer.train import command

        if os.environ.get("FAULT"):
            install(os.environ["FAULT"])
        command()
    else:
        sys.exit(rank.main(sys.argv[1:], "tests.integration.faulty_rank"))
