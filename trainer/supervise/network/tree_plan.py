"""Plan of the tree of supervisors, which its root keeps: who is whose child. Pure; no torch."""

from dataclasses import dataclass

Address = tuple[str, int]


@dataclass(frozen=True)
class Seat:
    """Place of a supervisor in the tree."""

    node: str
    address: Address
    parent: Address | None
    """Address of the supervisor above; None: the root."""


class TreePlan:
    """Plan of the tree, at the root: who is whose child.

    The children of the root are the first supervisor of each other node and all others of its own. Those of a
    first one are the others of its node.
    """

    def __init__(self, root_node: str) -> None:
        self._root_node = root_node
        self._first_of: dict[str, Address] = {}
        """Address of the first supervisor of each node but the root's."""
        self._seats: dict[int, Seat] = {}

    def parent(self, member: int, node: str, address: Address) -> Address | None:
        """Returns the address of a newcomer's parent; None means the root itself."""
        first = None if node == self._root_node else self._first_of.setdefault(node, address)
        parent = None if first == address else first
        self._seats[member] = Seat(node, address, parent)
        return parent

    def adopt(self, member: int, node: str, address: Address, above: int) -> None:
        """Records a member that is in the tree already, below the member `above`, from whom it got there."""
        seat = self._seats.get(above)
        self._seats[member] = Seat(node, address, None if seat is None else seat.address)
        if node != self._root_node:
            self._first_of.setdefault(node, address)

    def below(self, member: int) -> set[int]:
        """Returns the members below a member, which are of its node."""
        seat = self._seats.get(member)
        if seat is None:
            return set()
        return {other for other, its in self._seats.items() if its.parent == seat.address}

    def address(self, member: int) -> Address | None:
        """Returns the address at which a member listens; None if it is not known."""
        seat = self._seats.get(member)
        return None if seat is None else seat.address

    def on_node(self, node: str) -> list[tuple[int, Address]]:
        """Returns the members of a node with their addresses, without the root."""
        return [(member, seat.address) for member, seat in sorted(self._seats.items()) if seat.node == node]

    def forget(self, member: int) -> None:
        """Forgets a member that is lost; those below it get another parent when they ask."""
        seat = self._seats.pop(member, None)
        if seat is not None and self._first_of.get(seat.node) == seat.address:
            del self._first_of[seat.node]

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
