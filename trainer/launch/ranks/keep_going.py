"""Decides which supervisors a launcher starts again, and with which exit code it leaves.

For a run that survives the loss of a supervisor. All decisions are pure: no clock, no process. A *member* is
a supervisor; its number is that of its rank in the first world. No torch.
"""

from collections import Counter

from trainer.errors import EXIT_FAILED, EXIT_TIMED_OUT
from trainer.world.rank_process import SIGNALS

FIRST_WAIT_S = 1.0
"""Seconds before a dead supervisor is started again; the wait doubles with each further death."""
LONGEST_WAIT_S = 60.0
FORGIVEN_S = 600.0
"""Seconds that a supervisor must have lived for its next wait to begin at FIRST_WAIT_S again."""
CUT_OFF_WAIT_S = 30.0
"""Seconds before a supervisor is started again that left by itself while most others go on.

Its node was cut off from the others. At the end of a run all leave, within less time than this. The wait
doubles each time that it leaves again, for example since it cannot join.
"""
LONGEST_CUT_OFF_WAIT_S = 600.0
JOINED_S = 3600.0
"""Seconds after which a supervisor that leaves must have joined: its next wait is CUT_OFF_WAIT_S again."""
LEAVE_S = 30.0
"""Seconds for the last supervisors to leave, from the time at which more than half of them have left."""
_DOUBLINGS = 10
"""Most doublings of a wait, before its longest value counts."""
_CODES_OF_CUT_OFF = (EXIT_FAILED, EXIT_TIMED_OUT)
"""Exit codes of a supervisor that was cut off; with any other the whole run ends."""
_SSH_FAILED = 255
_BY_A_SIGNAL = 128


def left_by_itself(returncode: int, *, over_ssh: bool) -> bool:
    """Returns whether a supervisor chose its end; otherwise a signal ended it, or its host is gone.

    `returncode` is negative for a signal. ssh returns 255 if it lost its host; the shell there may turn
    signal N into 128 + N, as supervisors themselves do for a second request to stop.
    """
    if not over_ssh:
        return returncode >= 0
    number = returncode - _BY_A_SIGNAL
    return 0 <= returncode < _SSH_FAILED and (number <= 0 or number in [int(signal) for signal in SIGNALS])


class KeepGoing:
    """Counts the ends of supervisors in one start of a run. `now` is in seconds, on any clock."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._running = set(range(members))
        self._again_at: dict[int, float] = {}
        self._deaths: Counter[int] = Counter()
        self._left: dict[int, int] = {}
        """Exit codes of members that left by themselves, the last one last."""
        self._in_vain: Counter[int] = Counter()
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
                again = member in self._came_back and lived_s <= JOINED_S
                self._in_vain[member] = self._in_vain[member] + 1 if again else 0
                doublings = min(self._in_vain[member], _DOUBLINGS)
                wait = min(CUT_OFF_WAIT_S * 2.0**doublings, LONGEST_CUT_OFF_WAIT_S)
            if self.is_ending and self._ending_since is None:
                self._ending_since = now
        else:
            self._first_death = self._first_death or _as_exit_code(returncode)
            self._deaths[member] = 1 if lived_s > FORGIVEN_S else self._deaths[member] + 1
            wait = min(FIRST_WAIT_S * 2.0 ** min(self._deaths[member] - 1, _DOUBLINGS), LONGEST_WAIT_S)
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
        return self._in_vain[member]

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


def _as_exit_code(returncode: int) -> int:
    return returncode if returncode >= 0 else _BY_A_SIGNAL - returncode
