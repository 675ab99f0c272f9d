"""Plan of the tree of supervisors, which its root keeps: who is whose child. Pure; no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

Address = tuple[str, int]


@dataclass
class _First:
    """First supervisor of a node: the one that the others of its node are below."""

    node: str
    parent: Address | None
    children: int = 0


@dataclass(frozen=True)
class Seat:
    """Place of a supervisor in the tree."""

    node: str
    address: Address
    parent: Address | None
    """Address of the supervisor above; None: the root."""


class TreePlan:
    """Plan of the tree, at the root: who is whose child.

    It fills breadth first, so that the tree stays flat.
    """

    def __init__(self, root_node: str, fanout: int) -> None:
        self._fanout = fanout
        self._root_node = root_node
        self._root_children = 0
        self._firsts: dict[Address, _First] = {}
        """Firsts of nodes, in the order in which they came."""
        self._first_of: dict[str, Address] = {}
        self._seats: dict[int, Seat] = {}

    def parent(self, node: str, address: Address, member: int = -1) -> Address | None:
        """Returns the address of a newcomer's parent; None means the root itself.

        `member` is the newcomer's number.
        """
        parent = self._parent(node, address)
        self._seats[member] = Seat(node, address, parent)
        return parent

    def _parent(self, node: str, address: Address) -> Address | None:
        if node == self._root_node:
            return None
        first = self._first_of.get(node)
        if first is not None and first != address:
            return first
        if first is not None and self._firsts[first].parent in (None, *self._firsts):
            # The first supervisor of a node asks again if its parent did not answer.
            self._leave_parent(first)
            self._firsts[first].parent = None
            self._root_children += 1
            return None
        parent = self._with_room(address)
        if parent is None:
            self._root_children += 1
        else:
            self._firsts[parent].children += 1
        children = self._firsts[address].children if address in self._firsts else 0
        self._firsts[address] = _First(node, parent, children)
        self._first_of[node] = address
        return parent

    def _with_room(self, newcomer: Address) -> Address | None:
        """Returns the parent of a newcomer that takes whom is below it along; None: the root."""
        if self._root_children < self._fanout:
            return None
        for address, first in self._firsts.items():
            if first.children < self._fanout and self._is_below_the_root(address, newcomer):
                return address
        return None

    def _is_below_the_root(self, address: Address, newcomer: Address) -> bool:
        """Returns whether a first has a way to the root that does not lead through the newcomer."""
        above = list(self._above_or_self(address))
        return newcomer not in above and above[-1] in self._firsts

    def _leave_parent(self, address: Address) -> None:
        parent = self._firsts[address].parent
        if parent is None:
            self._root_children -= 1
        elif parent in self._firsts:
            self._firsts[parent].children -= 1

    def adopt(self, member: int, node: str, address: Address, above: int) -> None:
        """Records a member that is in the tree already, below the member `above`, from whom it got there."""
        seat = self._seats.get(above)
        parent = seat.address if seat is not None else None
        self._seats[member] = Seat(node, address, parent)
        if node != self._root_node and self._first_of.setdefault(node, address) == address:
            self._firsts[address] = _First(node, parent)
            if parent is None:
                self._root_children += 1
            elif parent in self._firsts:
                self._firsts[parent].children += 1

    def below(self, member: int) -> set[int]:
        """Returns all members below a member."""
        seat = self._seats.get(member)
        if seat is None:
            return set()
        return {
            other
            for other, its in self._seats.items()
            if other != member and its.parent is not None and seat.address in self._above_or_self(its.parent)
        }

    def address(self, member: int) -> Address | None:
        """Returns the address at which a member listens; None if it is not known."""
        seat = self._seats.get(member)
        return None if seat is None else seat.address

    def on_node(self, node: str) -> list[tuple[int, Address]]:
        """Returns the members of a node with their addresses, without the root."""
        return [(member, seat.address) for member, seat in sorted(self._seats.items()) if seat.node == node]

    def _above_or_self(self, address: Address) -> Iterator[Address]:
        """Yields an address and those above it; the last may be that of a member that is lost."""
        yield address
        first = self._firsts.get(address)
        while first is not None and first.parent is not None:
            yield first.parent
            first = self._firsts.get(first.parent)

    def forget(self, member: int) -> None:
        """Forgets a member that is lost; those below it find another parent when they ask."""
        seat = self._seats.pop(member, None)
        if seat is not None and self._first_of.get(seat.node) == seat.address:
            self._leave_parent(seat.address)
            del self._first_of[seat.node], self._firsts[seat.address]

    def successors(self, most: int) -> list[tuple[int, Address]]:
        """Returns up to `most` members with their addresses.

        Children of the root come first, since they notice its loss; of those, one of each node.
        """
        nodes: set[str] = {self._root_node}
        near: list[tuple[int, Address]] = []
        children: list[tuple[int, Address]] = []
        rest: list[tuple[int, Address]] = []
        for member, seat in sorted(self._seats.items()):
            if len(near) == most:
                break
            if seat.parent is not None:
                rest.append((member, seat.address))
                continue
            (children if seat.node in nodes else near).append((member, seat.address))
            nodes.add(seat.node)
        return [*near, *children, *rest][:most]
