"""Context of one supervisor: its place, its limits and its connections, which its parts share. No torch."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.run.exit_files import ExitFiles
from trainer.supervise.background import spawn
from trainer.supervise.limits import Limits
from trainer.supervise.machine import Machine
from trainer.supervise.messages import Message
from trainer.supervise.network.tree import Tree
from trainer.supervise.network.tree_plan import Address
from trainer.world.launchers import World


@dataclass(frozen=True)
class SupervisorContext:
    """Place of a supervisor among all, and how it reaches them."""

    world: World
    limits: Limits
    env: Mapping[str, str]
    """Environment that the launcher gave it."""
    exit_files: ExitFiles
    machine: Machine
    tree: Tree | None
    """Connections to the other supervisors; None: it works alone."""
    keeps_going: bool
    """True if the launcher keeps the others when a supervisor is gone."""
    send_up: Callable[[Message], None]
    """Sends a message to the coordinator, wherever it is."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def address(self) -> Address:
        """Address at which this supervisor listens; ("", 0) if it does not."""
        return self.tree.address if self.tree is not None else ("", 0)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the work in the background."""
        spawn(work, self.tasks)
