"""Reads what a step left on the device, when reading costs nothing: on a GPU one step later.

By then the GPU has the next step to do, so it is never idle for the host's sake, and the host is never more
than one step ahead of it. All ranks read the same values at the same step. Imports no torch.
"""

from collections.abc import Callable


class LateReads:
    """Actions that need a step's values on the host, in the order in which they were added."""

    def __init__(self, *, late: bool) -> None:
        """`late` is true for a GPU; on the CPU each action runs as soon as it is added."""
        self._late = late
        self._waiting: list[Callable[[], None]] = []

    def add(self, action: Callable[[], None]) -> None:
        """Runs the action at the next `settle`."""
        if self._late:
            self._waiting.append(action)
        else:
            action()

    def settle(self) -> None:
        """Runs the waiting actions; those after one that raises are dropped.

        Call it when the next step is under way, and before anything that needs to know how the last step
        ended.
        """
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()
