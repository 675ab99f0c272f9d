"""Waits for ranks that this process has started, here or over ssh.

By default the first that fails ends the others. In a run that survives the loss of a supervisor the others
go on, and a dead one is started again. No torch.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from trainer.run.exit_record import EXIT_DIR
from trainer.supervise.network.link import send_stop_request
from trainer.sysinfo.signals import signal_name
from trainer.text.terminal import tell
from trainer.world.rendezvous import Rendezvous
from trainer.world.restart_policy import CUT_OFF, RespawnPolicy, left_by_itself
from trainer.world.variables import RESPAWNED, STARTED_HERE

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL for the ranks that are left when one has failed."""
_POLL_S = 0.1


@dataclass(frozen=True)
class StartedRank:
    """Process of one rank's supervisor, or the ssh that started it on another host."""

    process: "subprocess.Popen[bytes]"
    host: str = ""
    """Host that ssh reaches; "" for this machine."""
    started: float = field(default_factory=time.monotonic)


StartRank = Callable[[int, Mapping[str, str]], StartedRank]
"""Starts a rank, given its number and variables besides those that it always gets. Raises OSError."""


def place_variables(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """Returns the variables with the place of a supervisor in a world of `size`, in torch's own names."""
    return {
        STARTED_HERE: "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
    }


def collect_signals() -> list[int]:
    """Collects SIGTERM and SIGINT from now on; returns the list to which they are added."""
    received: list[int] = []

    def collect(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, collect)
    return received


def run_ranks(
    start: StartRank,
    ranks: int,
    received: Sequence[int],
    launcher: str,
    *,
    keep_going: bool,
    first_rank: int = 0,
    asked: Callable[[], bool] = lambda: False,
) -> int:
    """Starts all ranks and waits for them; returns the exit code.

    With `keep_going` it is the one on which the surviving supervisors agreed, else that of the first rank
    that failed; 128 + N if signal N ended that rank or this process. `launcher` begins the lines for people,
    in which the ranks count from `first_rank`. Once `asked` says that the ranks were asked to stop, no
    supervisor is started again.
    """
    started = [start(rank, {}) for rank in range(ranks)]
    if keep_going:
        return _KeptRanks(start, started, received, launcher, first_rank, asked).wait()
    return _wait_for_first_failure(started, received, launcher, first_rank)


def _wait_for_first_failure(
    ranks: Sequence[StartedRank], received: Sequence[int], launcher: str, first_rank: int
) -> int:
    """Waits until all ranks have ended; the first failure, or a received signal, ends the others."""
    while None in [rank.process.poll() for rank in ranks]:
        if code := _first_failure(ranks, launcher, first_rank):
            _end_all(ranks)
            return code
        if received:
            _stop_all(ranks, received)
            return 128 + received[0]
        time.sleep(_POLL_S)
    return _first_failure(ranks, launcher, first_rank)


class _KeptRanks:
    """Supervisors of a run that goes on without one of them; `wait` is their whole life."""

    def __init__(
        self,
        start: StartRank,
        started: Sequence[StartedRank],
        received: Sequence[int],
        launcher: str,
        first_rank: int,
        asked: Callable[[], bool],
    ) -> None:
        self._asked = asked
        self._start, self._received, self._launcher = start, received, launcher
        self._first_rank = first_rank
        self._running = dict(enumerate(started))
        self._plan = RespawnPolicy(len(started))

    def wait(self) -> int:
        """Waits until all have ended, and starts dead ones again meanwhile; returns the exit code."""
        while not self._plan.is_over:
            now = time.monotonic()
            self._record_ends(now)
            if self._received:
                _stop_all(list(self._running.values()), self._received)
                break
            if self._plan.is_overdue(now):
                _end_all(list(self._running.values()))
                break
            for member in () if self._asked() else self._plan.due(now):
                self._start_again(member, now)
            time.sleep(_POLL_S)
        return 128 + self._received[0] if self._received else self._plan.exit_code

    def _record_ends(self, now: float) -> None:
        for member, rank in list(self._running.items()):
            code = rank.process.poll()
            if code is not None:
                del self._running[member]
                self._record_end(member, code, now, rank.host, now - rank.started)

    def _record_end(self, member: int, code: int, now: float, host: str, lived_s: float) -> None:
        wait_s = self._plan.record_end(member, code, now, lived_s=lived_s, over_ssh=bool(host))
        if not left_by_itself(code, over_ssh=bool(host)):
            where = f" on {host}" if host else ""
            next_start = "" if wait_s is None or self._asked() else f"; it is started again in {wait_s:.0f} s"
            how = _how(code) if code != 255 or not host else "since ssh lost its host"
            self._say(f"{self._name(member)}{where} ended {how}{next_start}")

    def _start_again(self, member: int, now: float) -> None:
        in_vain = self._plan.in_vain(member)
        if not in_vain:
            self._say(f"{self._name(member)} is started again")
        elif in_vain == 1:
            self._say(
                f"{self._name(member)} is started again, since it left with an error; if it does so "
                f"again, the waits grow up to {CUT_OFF.longest_s:.0f} s, and nothing more is said"
            )
        try:
            self._running[member] = self._start(member, {RESPAWNED: str(in_vain + 1)})
        except OSError as error:
            self._say(f"{self._name(member)} cannot be started again: {error}")
            self._plan.record_end(member, -signal.SIGKILL, now, lived_s=0.0)

    def _name(self, member: int) -> str:
        return f"rank {self._first_rank + member}'s supervisor"

    def _say(self, line: str) -> None:
        tell(f"{self._launcher}: {line}")


def _first_failure(ranks: Sequence[StartedRank], launcher: str, first_rank: int) -> int:
    """Returns the exit code of the lowest failed rank; 0 if none failed.

    Names that rank on stderr, unless a supervisor has shown why the run ends.
    """
    is_known = any(Path(os.environ.get(EXIT_DIR, os.devnull)).glob("rank-*.json"))
    for number, rank in enumerate(ranks, first_rank):
        if code := rank.process.returncode:
            if not is_known:
                tell(f"{launcher}: rank {number} ended {_how(code)}, so the other ranks were stopped")
            return code if code > 0 else 128 - code
    return 0


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"with exit code {returncode}"
    return f"by {signal_name(-returncode)}"


def _stop_all(ranks: Sequence[StartedRank], received: Sequence[int]) -> None:
    """Asks all ranks to stop, and ends those of this machine that still run after GRACE_S.

    A signal to ssh does not reach the other host. So rank 0's supervisor is asked, which tells all; then no
    ssh is ended before its rank, unless a second signal comes.
    """
    elsewhere = any(rank.host and rank.process.poll() is None for rank in ranks)
    rendezvous = Rendezvous.from_env(os.environ)
    if elsewhere and rendezvous and send_stop_request(rendezvous, received[0]):
        while len(received) == 1 and None in [rank.process.poll() for rank in ranks]:
            time.sleep(_POLL_S)
    _end_all(ranks)


def _end_all(ranks: Sequence[StartedRank]) -> None:
    """Ends what still runs: with SIGTERM, and after GRACE_S with SIGKILL."""
    _signal_all(ranks, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while None in [rank.process.poll() for rank in ranks]:
        if time.monotonic() > deadline:
            _signal_all(ranks, signal.SIGKILL)
        time.sleep(_POLL_S)


def _signal_all(ranks: Sequence[StartedRank], number: int) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(number)
