"""One generation of a rank: its process, its folder in memory and its heartbeat.

The ranks of one start of a run are started once, and again after each fault that the run survives. All that
belongs to one of these times is in one object, which the supervisor replaces. No torch.
"""

import asyncio
import resource
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from trainer.run.exit_record import RANK_DIR, ExitRecord, first_cause
from trainer.supervise.rank.fork_server import ForkServer
from trainer.supervise.rank.rank_report import (
    STACK_FILE,
    RankReport,
    flight_record,
    is_stopped,
    python_stack,
    report,
    report_variables,
)
from trainer.sysinfo import memory
from trainer.sysinfo.addresses import free_port, is_here, listening_address, own_ipv4
from trainer.world import heartbeat
from trainer.world.condemned import condemned
from trainer.world.heartbeat import RankState, publish_heartbeat
from trainer.world.rank_process import RankProcess, end_rank, kill_rank, rank_folder, reap_group
from trainer.world.variables import GENERATION, MEETS, USES_AGENT_STORE

_POLL_S = 0.02
_STACK_CHARACTERS = 4000


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
    def pid(self) -> int:
        """Process id of the rank."""
        return self.rank.pid

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped the rank; one that a debugger has stopped does not count."""
        return is_stopped(self.rank.pid)

    def poll(self) -> int | None:
        """Returns the rank's exit code, minus the signal's number after a signal, or None while it runs."""
        return self.rank.poll()

    def look(self) -> None:
        """Takes note of the memory that the rank, which runs, has held."""
        self.seen_kb = memory.peak_kb(self.rank.pid) or self.seen_kb

    def state(self) -> RankState:
        """Returns the rank's state, as its heartbeat shows it."""
        return heartbeat.read(self.memory)

    def moments(self) -> Mapping[str, float]:
        """Returns the moments of its start that the rank has reached."""
        return heartbeat.moments(self.memory)

    def request_stop(self) -> None:
        """Asks the rank to save and leave."""
        heartbeat.request_stop(self.memory)

    def renew_lease(self, lease_s: float) -> None:
        """Lets the rank live for that many seconds more."""
        heartbeat.renew_lease(self.memory, lease_s)

    def limit_init(self, init_s: float) -> None:
        """Sets the limit of init, unless the rank sets its limits itself by now."""
        heartbeat.limit_init(self.memory, init_s)

    def condemned(self) -> dict[str, str]:
        """Returns the nodes that the rank has condemned, each with the reason."""
        return condemned(self.folder)

    def first_cause(self) -> ExitRecord | None:
        """Returns the cause that the rank, which has ended, has recorded first; None if it has not."""
        return first_cause(self.folder)

    def killed_hint(self, ranks: int) -> str:
        """Returns why the kernel may have killed the rank, one of that many on its node."""
        return memory.killed_hint(self._peak_kb, ranks)

    def last_stack(self) -> str:
        """Returns the Python stack that the rank has written as it was killed; "" if it has not."""
        file = self.folder / STACK_FILE
        return file.read_text(errors="replace")[:_STACK_CHARACTERS] if file.exists() else ""

    def report(self, number: int, node: str, state: RankState) -> RankReport:
        """Returns what the rank of that number does now."""
        return report(number, node, self.rank.pid, state)

    async def python_stack(self) -> str:
        """Returns the rank's Python stacks, or why there are none."""
        return await python_stack(self.rank.pid, self.folder)

    async def save_flight_record(self, target: Path) -> None:
        """Copies NCCL's flight record of the rank into a folder, if there is one."""
        await flight_record(self.folder, target)

    @property
    def _peak_kb(self) -> int:
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

    def kill(self) -> None:
        """Kills the rank and all that it started, and waits a moment for its end."""
        end_rank(self.rank)

    def close(self) -> None:
        """Kills the rank and all that it started, if that is not done yet, and removes its folder."""
        self.kill()
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
