"""Supervises one rank: `python -m trainer.rank JOB [--set KEY=VALUE ...]`.

A launcher starts it for each rank. The rank below it is `python -m trainer.train` with the same arguments;
that also runs alone, without a supervisor. This process imports no torch.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version

from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    InputError,
    MachineError,
    Preempted,
)
from trainer.run.exit_record import EXIT_DIR
from trainer.run.goodput_log import BEGAN
from trainer.supervise.limits import Limits, read_limits
from trainer.supervise.rank.fork_server import ForkServer
from trainer.supervise.supervisor import supervise
from trainer.sysinfo.shortage import LEAST_OPEN_FILES, raise_open_files_limit, shortage
from trainer.sysinfo.signals import collect_requests, reset_inherited_signals
from trainer.sysinfo.streams import use_streams
from trainer.sysinfo.variables import name_problems
from trainer.text.terminal import say
from trainer.world.launchers import detect
from trainer.world.state_folder import state_folder, with_state_folder


def main(arguments: Sequence[str], module: str = "trainer.train", *, restarts: bool = True) -> int:
    """Supervises this rank of the job, which `module` runs.

    Returns the run's exit code, the same on every rank. `restarts` says that the job's `[recovery]` counts:
    the module goes on from checkpoints.
    """

    def limits() -> Limits:
        job_limits = read_limits(arguments, collect_requests())
        return job_limits if restarts else replace(job_limits, max_restarts=0)

    use_streams()
    reset_inherited_signals()
    try:
        world = detect(os.environ, os.uname().nodename)
        # Any supervisor may become the root of the tree, which has a connection to each other node.
        raise_open_files_limit(LEAST_OPEN_FILES + world.size // world.local_size - 1)
    except (InputError, MachineError) as error:
        say(error)
        return EXIT_FAILED if isinstance(error, MachineError) else EXIT_BAD_INPUT
    if world.rank == 0 and EXIT_DIR not in os.environ:  # `clipship run` has checked them already
        for problem in name_problems((), version("torch"), os.environ):
            say(f"warning: {problem}")
    command = [sys.executable, "-P", "-m", "trainer.supervise.rank.rank_start", module, *arguments]
    os.environ.setdefault(BEGAN, f"{time.time():.3f}")
    with state_folder(os.environ, world.node) as kept:
        env = with_state_folder(os.environ, kept)
        try:
            code = supervise(world, command, env, limits, fork_server=ForkServer(command, use=restarts))
        except InputError as error:
            say(error)
            return EXIT_BAD_INPUT
        except Preempted as stop:
            say(stop)
            return EXIT_PREEMPTED
        except (OSError, RuntimeError, MachineError) as error:
            sentence = str(error) if isinstance(error, MachineError) else shortage(error)
            if not sentence:
                raise
            say(f"rank {world.rank} on {world.node} cannot be started: {sentence}")
            return EXIT_FAILED
        if kept is not None:
            kept.failed = code not in (EXIT_DONE, EXIT_PREEMPTED, EXIT_BAD_INPUT)
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
