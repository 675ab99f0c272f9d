"""Roster: what every supervisor knows of the others, so that another can take the coordinator's place.

The coordinator sends it down the tree when a member has come or gone. Pure; no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.supervise.coordinate.membership import WorldPlan, members_of, runs_text
from trainer.supervise.network.tree_plan import Address

SUCCESSORS = 8
"""Number of supervisors that may become the coordinator, in a fixed order."""


@dataclass(frozen=True)
class Roster:
    """Members of the run as the coordinator saw them last."""

    generation: int
    world: WorldPlan
    """World of that generation."""
    members: tuple[tuple[int, str], ...]
    """Numbers and nodes of all who are there, with and without a rank."""
    succession: tuple[tuple[int, Address], ...]
    """Numbers and addresses of the coordinator and of those who follow it, in order."""
    beside: tuple[tuple[int, Address], ...] = ()
    """Numbers and addresses of others of the coordinator's node, which may end together with it."""

    def to_message(self) -> dict[str, Any]:
        """Returns the roster as a message to all supervisors."""
        return {
            "kind": "roster",
            "generation": self.generation,
            "world": self.world.to_text(),
            "others": None if self.members == self.world.members else runs_text(self.members),
            "succession": self.succession,
            "beside": self.beside,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "Roster":
        """Returns the roster of a message."""
        return cls(
            int(message["generation"]),
            WorldPlan.from_text(message["world"]),
            tuple(members_of(message["world"] if message["others"] is None else message["others"])),
            _places(message["succession"]),
            _places(message.get("beside", ())),
        )

    @property
    def addresses(self) -> dict[int, Address]:
        """Address of each member whose address is known."""
        return dict([*self.beside, *self.succession])

    def node_of(self, member: int) -> str:
        """Returns the member's node, "" if it is not known."""
        return next((node for number, node in self.members if number == member), "")


def _places(rows: Sequence[Any]) -> tuple[tuple[int, Address], ...]:
    return tuple((int(member), (str(host), int(port))) for member, (host, port) in rows)
