"""A rank that trains nothing and needs no torch.

It prints its world and some of its environment as one line of JSON, then does what its words say. Without
words it leaves. `fail RANK CODE`: that rank records why and leaves. `hold RANK CODE`: it does the same, and
the others ignore SIGTERM. `leave RANK CODE`: it leaves without a record. `die RANK`: it is killed.
`wait NOBODY`: all ranks stay. Ranks that the words do not name stay for good.
"""

import json
import os
import signal
import sys
import time
from dataclasses import asdict

from trainer.run.exit_record import ExitRecord, record_exit
from trainer.world.launchers import World, detect

TOLD = ("CLIPSHIP_WORLD_SIZE", "MASTER_", "NCCL_", "OMP_", "PYTHONUNBUFFERED", "SSH_CONNECTION")
"""Beginnings of the variables' names that tests ask for."""


def main(words: list[str]) -> int:
    world = detect(os.environ, os.uname().nodename)
    deed, rank, *rest = words or ["leave", str(world.rank), "0"]
    if deed == "hold":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    env = {name: value for name, value in os.environ.items() if name.startswith(TOLD)}
    # One write of less than 4 KiB: mpirun hands longer lines on in pieces, and those of two ranks mix.
    os.write(1, json.dumps({**asdict(world), "pid": os.getpid(), "env": env}).encode() + b"\n")
    if rank == str(world.rank):
        time.sleep(0.5 if words else 0)  # the others have begun
        return _do(deed, world, *map(int, rest))
    time.sleep(600)
    return 0


def _do(deed: str, world: World, exit_code: int = 0) -> int:
    if deed == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed in ("fail", "hold"):
        record_exit(ExitRecord(world.rank, world.node, exit_code, "told to fail", time.time()), os.environ)
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
