"""Runs torchrun for one machine, without an agent that listens.

It ends with the first failed rank's exit code and one line. torchrun's own `--standalone` listens on every
interface and unpickles what it reads there: whoever reaches the port can run code. A single agent has no
other agent to meet, so its store is in memory here, and rank 0 serves the ranks at MASTER_ADDR and
MASTER_PORT. `python -m trainer.comm.torchrun` takes torchrun's arguments. It is a process of its own, since
the launcher half never imports torch.
"""

import logging
import os
import sys
from collections.abc import Sequence

from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

ALONE = "clipship-alone"


class AloneRendezvous(RendezvousHandler):
    """Rendezvous of a single agent.

    Its store is in this process's memory; nothing listens and nothing is unpickled.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = HashStore()

    def get_backend(self) -> str:
        return ALONE

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        return RendezvousInfo(self._store, 0, 1, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Does nothing: no other agent could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _alone(parameters: RendezvousParameters) -> RendezvousHandler:
    return AloneRendezvous(parameters.run_id)


def main(arguments: Sequence[str]) -> int:
    """Starts the ranks and waits for them; returns the exit code of the first that failed.

    The code is 128 + N if signal N ended that rank or torchrun itself.
    """
    logging.disable(logging.CRITICAL)  # only this process's logs: they repeat the line printed below
    rendezvous_handler_registry.register(ALONE, _alone)
    try:
        torchrun([f"--rdzv-backend={ALONE}", "--rdzv-endpoint=nowhere", *arguments])
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        how = f"with exit code {first.exitcode}" if first.exitcode > 0 else f"by signal {first.signal_name()}"
        print(f"torchrun: rank {rank} ended {how}, so the other ranks were stopped", file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as stop:
        return 128 + stop.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
