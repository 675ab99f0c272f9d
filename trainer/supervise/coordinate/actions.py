"""Actions that the coordinator can ask of the supervisor that it is part of. No torch."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.run.exit_record import ExitRecord
from trainer.run.generations import GenerationClaim

Message = dict[str, Any]


async def is_unknown(_member: int) -> bool:
    """Answers for every member that it may live."""
    return False


@dataclass(frozen=True)
class Actions:
    """Actions that the coordinator can ask of rank 0's supervisor."""

    broadcast: Callable[[Message], None]
    """Sends a message to every supervisor, this one included."""
    finish: Callable[[ExitRecord], None]
    """Ends the run."""
    steps_done: Callable[[], float] = lambda: 1.0
    """Returns the number of the last step that rank 0 has done in its present generation."""
    has_begun: Callable[[], bool] = lambda: True
    """Returns whether rank 0, and so perhaps others, has done anything that could be saved."""
    say: Callable[[str], None] = lambda line: None
    """Shows a line to people."""
    fresh_variables: Callable[[], Awaitable[Mapping[str, str]]] | None = None
    """Returns the variables by which the ranks of the next generation meet. Raises OSError.

    None: the supervisors cannot start their ranks again.
    """
    moments: Callable[[], Mapping[str, float]] = dict
    """Returns the moments of its start that rank 0 has reached in its present generation."""
    in_memory: Callable[[], int] = lambda: 0
    """Returns the newest step that this node has kept in memory; 0 if there is none."""
    claim: Callable[[int], Awaitable[GenerationClaim | None]] | None = None
    """Claims the generation of that number; returns None, or the claim that is in the way."""
    below: Callable[[int], set[int]] = lambda member: set()
    """Returns the members whose way to this supervisor leads through that one."""
    is_gone: Callable[[int], Awaitable[bool]] = is_unknown
    """Returns whether a member's process has surely ended, since its machine refuses calls to it.

    It takes at most some seconds. False: it may live, or its machine is gone.
    """
    forget: Callable[[int], None] = lambda member: None
    """Forgets the connection of a member that is lost."""
    members_changed: Callable[[], None] = lambda: None
    """Is called when a member has come or gone, or when a generation has started."""
    leave: Callable[[str], None] = lambda other: None
    """Ends this supervisor as cut off from the others, without a word in the run folder."""
