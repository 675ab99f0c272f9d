"""What a launcher starts for each rank: `python -m trainer.rank JOB [--set KEY=VALUE ...]`, a supervisor and under it the rank.

The rank is `python -m trainer.train` with the same words; it also runs alone, without a supervisor. No torch in this process.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version

from trainer.errors import EXIT_BAD_INPUT, InputError
from trainer.exits import EXIT_DIR
from trainer.health.limits import read_limits
from trainer.health.supervisor import supervise
from trainer.health.variables import name_problems
from trainer.world import detect


def main(words: Sequence[str], module: str = "trainer.train") -> int:
    """Supervise this rank of the job, which `module` runs; returns the run's exit code, the same on every rank."""
    try:
        world = detect(os.environ, os.uname().nodename)
    except InputError as error:
        print(f"clipship: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if world.rank == 0 and EXIT_DIR not in os.environ:  # `clipship run` has looked at them already
        for problem in name_problems(os.environ, version("torch")):
            print(f"clipship: warning: {problem}", file=sys.stderr)
    command = [sys.executable, "-P", "-m", "trainer.health.start", module, *words]
    return supervise(world, command, os.environ, partial(read_limits, words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
