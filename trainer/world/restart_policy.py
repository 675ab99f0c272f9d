"""Decides what is started again: how often, after which wait, and when that is of no use any more.

Three ask: the coordinator about its ranks (`RestartPolicy`), a launcher about the supervisors that it has
started (`RespawnPolicy`), and whoever started a run that has ended, about the run (`after_end`). All count
with `in_a_row`.
Which nodes do without a rank, `trainer.supervise.coordinate.membership` decides. All decisions are pure: no
clock, no process, no file. No torch.
"""

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_TIMED_OUT
from trainer.run.retry import Backoff
from trainer.run.starts import StartsSoFar
from trainer.sysinfo.signals import SIGNALS
from trainer.text.wording import many

_LONGEST_WAIT = 8
"""Longest wait before a restart of the ranks, as a multiple of `backoff_s`."""
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:[.,]\d+)*")

KILLED = Backoff(1.0, 60.0)
"""Waits before a supervisor that was killed is started again."""
FORGIVEN_S = 600.0
"""Seconds that a supervisor must have lived for its next wait to be the first one again."""
CUT_OFF = Backoff(30.0, 600.0)
"""Waits before a supervisor is started again that left by itself while most others go on.

Its node was cut off from the others. At the end of a run all leave, within less time than the first wait. The
wait doubles each time that it leaves again, for example since it cannot join.
"""
JOINED_S = 3600.0
"""Seconds after which a supervisor that leaves must have joined: its next wait is the first one again."""
LEAVE_S = 30.0
"""Seconds for the last supervisors to leave, from the time at which more than half of them have left."""
_CODES_OF_CUT_OFF = (EXIT_FAILED, EXIT_TIMED_OUT)
"""Exit codes of a supervisor that was cut off; with any other the whole run ends."""
_SSH_FAILED = 255
_BY_A_SIGNAL = 128


def in_a_row(before: int, *, progress: bool) -> int:
    """Returns how many failures there were in a row, with this one; `progress` since the last begins anew."""
    return 1 if progress else before + 1


@dataclass(frozen=True)
class Fault:
    """Death or hang of a rank, which would end the run."""

    rank: int
    node: str
    step: int
    """Step that the rank was working on; 0 before the first."""
    cause: str
    lost: bool = False
    """True if the supervisor is gone, too, or the node is unfit: that is no bug of the program."""

    def is_like(self, other: "Fault") -> bool:
        """Returns whether rank, step and cause are the same.

        Numbers in the causes may differ: addresses, ports and processes are new in each generation.
        """
        if self.lost or other.lost:
            return False
        return (self.rank, self.step) == (other.rank, other.step) and _NUMBER.sub("N", self.cause) == (
            _NUMBER.sub("N", other.cause)
        )


@dataclass(frozen=True)
class GoOn:
    """Decision that the ranks are restarted."""

    number: int
    """Number of this restart since the last one that saved a checkpoint, from 1."""
    wait_s: float


@dataclass(frozen=True)
class GiveUp:
    """Decision that the run ends; `reason` is the end of a sentence about the fault."""

    reason: str


class RestartPolicy:
    """Counts faults of one start of a run and decides about each in turn."""

    def __init__(
        self,
        max_restarts: int,
        same_fault_limit: int,
        backoff_s: float,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`jitter` returns numbers from 0 to below 1."""
        self._max_restarts, self._same_fault_limit = max_restarts, same_fault_limit
        self._backoff, self._jitter = Backoff(backoff_s, _LONGEST_WAIT * backoff_s), jitter
        self._failures = self._saved_step = 0
        """Faults without a newer checkpoint in between, and the step of that checkpoint."""
        self._fruitless = 0
        """Faults in a row before which no new step was done and nothing was saved."""
        self._last: Fault | None = None
        self._alike = 0
        """Faults in a row that are like the last one."""

    def decide(self, fault: Fault, saved_step: int, *, new_step: bool = False) -> GoOn | GiveUp:
        """Returns what to do about a fault; `saved_step` is the step of the newest checkpoint, 0 for none.

        `new_step` says that a step was done since the last fault that had never been done before.
        """
        number = self._failures = in_a_row(self._failures, progress=saved_step > self._saved_step)
        self._saved_step = max(self._saved_step, saved_step)
        self._fruitless = in_a_row(self._fruitless, progress=new_step or number == 1)
        is_like_last = self._last is not None and fault.is_like(self._last)
        self._alike, self._last = in_a_row(self._alike, progress=not is_like_last), fault
        if self._alike >= self._same_fault_limit:
            return GiveUp(
                f"the same fault at the same step {self._alike} times in a row looks like a bug and not "
                f"like a fault of a machine (recovery.same_fault_limit = {self._same_fault_limit})"
            )
        if number > self._max_restarts:
            return GiveUp(
                f"{many(number - 1, 'restart')} without a new checkpoint in between "
                f"{'is' if number == 2 else 'are'} all that recovery.max_restarts allows"
            )
        # the first one since a new step or checkpoint does not wait
        fruitless = self._fruitless - 1
        return GoOn(number, self._backoff.wait_s(fruitless, self._jitter()) if fruitless else 0.0)


def after_end(
    so_far: StartsSoFar, code: int, *, asked: bool, saved_step: int, retries: int, message: str
) -> StartsSoFar:
    """Returns the starts of a run after one has ended with this exit code.

    `asked` says that the launcher was asked to stop: the next one resumes the run. A run also ends with 75 if
    one of its nodes was asked to stop; it is then started again.
    """
    ended = replace(so_far, code=code, message=message)
    if code == EXIT_DONE or asked or code in (EXIT_BAD_INPUT, EXIT_PREEMPTED):
        return replace(ended, over=code == EXIT_DONE or (code == EXIT_BAD_INPUT and not asked))
    failures = in_a_row(so_far.failures, progress=saved_step > so_far.saved_step)
    saved_step = max(so_far.saved_step, saved_step)
    return replace(ended, failures=failures, saved_step=saved_step, over=failures > retries)


def left_by_itself(returncode: int, *, over_ssh: bool) -> bool:
    """Returns whether a supervisor chose its end; otherwise a signal ended it, or its host is gone.

    `returncode` is negative for a signal. ssh returns 255 if it lost its host; the shell there may turn
    signal N into 128 + N, as supervisors themselves do for a second request to stop.
    """
    if not over_ssh:
        return returncode >= 0
    number = returncode - _BY_A_SIGNAL
    return 0 <= returncode < _SSH_FAILED and (number <= 0 or number in [int(signal) for signal in SIGNALS])


class RespawnPolicy:
    """Decides which supervisors of a start are started again, and with which exit code the launcher leaves.

    For a run that survives the loss of a supervisor. A *member* is a supervisor; its number is that of its
    rank in the first world. `now` is in seconds, on any clock.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self._running = set(range(members))
        self._again_at: dict[int, float] = {}
        self._deaths: Counter[int] = Counter()
        self._left: dict[int, int] = {}
        """Exit codes of members that left by themselves, the last one last."""
        self._cut_off: Counter[int] = Counter()
        self._came_back: set[int] = set()
        self._first_death = 0
        self._ending_since: float | None = None

    def record_end(
        self, member: int, returncode: int, now: float, *, lived_s: float, over_ssh: bool = False
    ) -> float | None:
        """Records that a member has ended; returns the wait until it is started again, None if it is not."""
        self._running.discard(member)
        if left_by_itself(returncode, over_ssh=over_ssh):
            self._left[member] = returncode
            wait = None
            if returncode in _CODES_OF_CUT_OFF:
                has_joined = member not in self._came_back or lived_s > JOINED_S
                self._cut_off[member] = in_a_row(self._cut_off[member], progress=has_joined)
                wait = CUT_OFF.wait_s(self._cut_off[member])
            if self.is_ending and self._ending_since is None:
                self._ending_since = now
        else:
            self._first_death = self._first_death or as_exit_code(returncode)
            self._deaths[member] = in_a_row(self._deaths[member], progress=lived_s > FORGIVEN_S)
            wait = KILLED.wait_s(self._deaths[member])
        if wait is None or self.is_ending or not self._running:
            return None
        self._again_at[member] = now + wait
        return wait

    def due(self, now: float) -> list[int]:
        """Returns the members that must be started now, and counts them as running."""
        if self.is_ending or not self._running:
            return []
        members = sorted(member for member, at in self._again_at.items() if at <= now)
        for member in members:
            del self._again_at[member]
            self._left.pop(member, None)
        self._came_back |= set(members)
        self._running |= set(members)
        return members

    def in_vain(self, member: int) -> int:
        """Returns how many times in a row a member was started again and left with an error."""
        return max(0, self._cut_off[member] - 1)

    @property
    def is_ending(self) -> bool:
        """True once more than half of the members have left by themselves: then the run is over.

        One that came back and left with an error does not count: it may only have found no way to join.
        """
        leaving = [code == 0 or member not in self._came_back for member, code in self._left.items()]
        return 2 * sum(leaving) > self._members

    @property
    def is_over(self) -> bool:
        """True if no member runs; none is then started again."""
        return not self._running

    def is_overdue(self, now: float) -> bool:
        """Returns whether members still run long after the run's end."""
        return self._ending_since is not None and now - self._ending_since > LEAVE_S

    @property
    def exit_code(self) -> int:
        """Exit code on which the surviving members agreed: that of most, and of several the latest.

        128 + N of the first that signal N ended if none survived; 255 if ssh lost it.
        """
        if not self._left:
            return self._first_death
        codes = list(self._left.values())
        return max(reversed(codes), key=Counter(codes).__getitem__)


def as_exit_code(returncode: int) -> int:
    """Returns the code with which a launcher leaves: 128 + N for signal N."""
    return returncode if returncode >= 0 else _BY_A_SIGNAL - returncode
