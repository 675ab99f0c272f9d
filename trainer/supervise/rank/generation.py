"""One generation of a rank: its process, its folder in memory and its heartbeat.

The ranks of one start of a run are started once, and again after each fault that the run survives. All that
belongs to one of these times is in one object, which the supervisor replaces. No torch.
"""

import asyncio
import resource
from collections.abc import Mapping
from contextlib import ExitStack

from trainer.run.exit_record import RANK_DIR
from trainer.supervise.rank.fork_server import ForkServer
from trainer.supervise.rank.rank_report import report_variables
from trainer.sysinfo.addresses import free_port, is_here, listening_address, own_ipv4
from trainer.world import heartbeat
from trainer.world.heartbeat import publish_heartbeat
from trainer.world.rank_process import RankProcess, end_rank, kill_rank, rank_folder, reap_group
from trainer.world.variables import GENERATION, MEETS, USES_AGENT_STORE

_POLL_S = 0.02


class RankOfGeneration:
    """Process of this supervisor's rank from one start of all ranks to the next."""

    def __init__(
        self, number: int, fork_server: ForkServer, env: Mapping[str, str], *, is_root: bool
    ) -> None:
        """Starts the rank. `number` counts generations from 1; rank 0's (`is_root`) shows its heartbeat.

        Raises OSError if the process cannot be started.
        """
        self.number = number
        self.reported_end = False
        self.reported_late = False
        self.report_requested = False
        self.ending = False
        """True once the rank is being ended for the next generation: its end is then no news."""
        self.ended = False
        """True once the rank and all that it started are gone, after `end`."""
        self.seen_kb = 0
        """Most memory that the rank had held when it was last looked at."""
        self._others_kb = _most_of_ended_kb()
        self._clean_up = ExitStack()
        try:
            self.folder = self._clean_up.enter_context(rank_folder())
            self.memory = heartbeat.make(self.folder)
            if is_root:
                publish_heartbeat(self.folder, env)
            own = {GENERATION: str(number), RANK_DIR: str(self.folder), **report_variables(self.folder)}
            self.rank: RankProcess = fork_server.start({**env, **own})
        except BaseException:
            self._clean_up.close()
            raise

    @property
    def peak_kb(self) -> int:
        """Most memory that the rank, which has ended, has held.

        The kernel tells that of the largest child that has ended, which may be the rank before.
        """
        most_kb = _most_of_ended_kb()
        return self.seen_kb if self.seen_kb and most_kb <= self._others_kb else most_kb

    async def end(self) -> None:
        """Kills the rank and all that it started, and waits until the kernel has ended it, however long."""
        self.ending = True
        if self.ended:
            return
        kill_rank(self.rank)
        # One that the kernel cannot end yet, as in a hung file system, may still write: nobody may follow it.
        while self.rank.poll() is None:
            await asyncio.sleep(_POLL_S)
        reap_group(self.rank)
        self._clean_up.close()
        self.ended = True

    def close(self) -> None:
        """Kills the rank and all that it started, if that is not done yet, and removes its folder."""
        end_rank(self.rank)
        self._clean_up.close()


def _most_of_ended_kb() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def fresh_variables(env: Mapping[str, str], address: str = "") -> dict[str, str]:
    """Returns the variables by which the ranks of the next generation meet; rank 0's supervisor calls it.

    `address` is the one by which other supervisors reach this one; MASTER_ADDR becomes that if the launcher's
    belongs to another machine. Horovod's ranks need one of IPv4.

    Nothing of the last generation may be met there: MASTER_PORT is a new port of this machine, which rank 0
    itself serves. Raises OSError.
    """
    variables = {}
    if host := env.get("MASTER_ADDR"):
        if address and not is_here(host):
            host = own_ipv4() if MEETS in env and ":" in address else address
            variables["MASTER_ADDR"] = host
        variables["MASTER_PORT"] = str(free_port(listening_address(host) or ""))
    if USES_AGENT_STORE in env:
        variables[USES_AGENT_STORE] = "False"
    return variables
