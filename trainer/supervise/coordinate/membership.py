"""Members of a run, and which of them make the world of its next generation.

A member is a supervisor; its number is the rank that the launcher gave it, and it keeps that number. A rank
is the number of a member's rank in one world; a member that has no rank there is a spare. All decisions are
pure: no clock, no process, no file. No torch.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal

from trainer.text.wording import many

FAULTS_OF_A_BAD_NODE = 2
"""Faults from which on a node is excluded if the other nodes make a world that is as large."""
Kind = Literal["gone", "failed", "condemned", "unfit"]
"""gone: members are lost; failed: a node has failed too often; condemned: it does badly; unfit: it has failed
the preflight, and gets no rank any more. The other two get one if there are too few nodes without them. The
run folder has these words."""
_MOST = 16


@dataclass(frozen=True)
class Place:
    """Place of a member's rank in a world; `cross` is Horovod's rank and size across nodes."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross: tuple[int, int]


@dataclass(frozen=True)
class WorldPlan:
    """World of one generation: its members and their nodes, in the order of ranks."""

    members: tuple[tuple[int, str], ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Members in the order of ranks."""
        return tuple(member for member, _ in self.members)

    def place(self, member: int) -> Place | None:
        """Returns the member's place; None if it has no rank in this world."""
        return place_in(self.to_text(), member)

    def to_text(self) -> str:
        """Returns the world as text: runs of consecutive members, so it is short and soon read."""
        return runs_text(self.members)

    @classmethod
    def from_text(cls, text: str) -> "WorldPlan":
        """Returns the world that `to_text` wrote."""
        return cls(tuple(members_of(text)))


def place_in(world: str, member: int) -> Place | None:
    """Returns the member's place in a world, as `WorldPlan.to_text` wrote it.

    It takes time in proportion to the nodes, not to the ranks.
    """
    size, rank, own, before = 0, -1, "", 0
    on_node: dict[str, int] = {}
    for node, first, last in runs_of(world):
        if first <= member <= last:
            rank, own = size + member - first, node
            before = on_node.get(node, 0) + member - first
        on_node[node] = on_node.get(node, 0) + last - first + 1
        size += last - first + 1
    if rank < 0:
        return None
    across = [node for node, ranks in on_node.items() if ranks > before]
    return Place(rank, size, before, on_node[own], (across.index(own), len(across)))


def runs_text(members: Iterable[tuple[int, str]]) -> str:
    """Returns members with their nodes as text, a line for each run of numbers on one node."""
    runs: list[tuple[str, int, int]] = []
    for number, node in members:
        if runs and runs[-1][0] == node and runs[-1][2] == number - 1:
            runs[-1] = node, runs[-1][1], number
        else:
            runs.append((node, number, number))
    return "\n".join(f"{first} {last} {node}" for node, first, last in runs)


def runs_of(text: str) -> Iterator[tuple[str, int, int]]:
    """Yields node, first and last number of each run that `runs_text` wrote."""
    for line in text.splitlines():
        first, last, node = line.split(" ", 2)
        yield node, int(first), int(last)


def members_of(text: str) -> Iterator[tuple[int, str]]:
    """Yields each member of the runs with its node."""
    for node, first, last in runs_of(text):
        for number in range(first, last + 1):
            yield number, node


class Membership:
    """Counts who is there and which nodes failed, and chooses the next world."""

    def __init__(
        self,
        members: Iterable[int],
        wanted: int,
        fewest: int,
        sizes: Sequence[int] = (),
        *,
        even_nodes: bool = False,
    ) -> None:
        """`wanted` and `fewest` are numbers of ranks.

        `sizes` are those that can train the job, smallest first; empty: only `wanted`. With `even_nodes` each
        node of a world must have as many ranks as any other.
        """
        self.expected = frozenset(members)
        """Numbers of all members that the launcher started."""
        self.wanted, self.fewest, self.even_nodes = wanted, fewest, even_nodes
        self._sizes = [size for size in sizes if size >= fewest] or [wanted]
        self.nodes: dict[int, str] = {}
        """Node of each member that has ever joined."""
        self._lost: set[int] = set()
        self._faults: Counter[str] = Counter()
        self._excluded: dict[str, tuple[Kind, str]] = {}

    def join(self, member: int, node: str) -> None:
        """Records that a member is there, for the first time or again."""
        self.nodes[member] = node
        self._lost.discard(member)

    def lose(self, member: int) -> None:
        """Records that a member is gone."""
        self._lost.add(member)

    def record_fault(self, node: str) -> None:
        """Counts a fault of a rank or supervisor of the node; an unknown one, "", is nobody's."""
        if node:
            self._faults[node] += 1

    def exclude(self, node: str, kind: Kind, why: str) -> None:
        """Excludes a node that is condemned or unfit from the next world on; failures are counted anyway."""
        if kind == "unfit" or (kind == "condemned" and self.kind_of(node) != "unfit"):
            self._excluded[node] = kind, why

    @property
    def living(self) -> list[int]:
        """Numbers of the members that are there, in order."""
        return sorted(member for member in self.nodes if member not in self._lost)

    @property
    def lost(self) -> frozenset[int]:
        """Numbers of the members that are gone."""
        return frozenset(self._lost)

    @property
    def excluded(self) -> dict[str, str]:
        """Nodes that are excluded if possible, each with the reason."""
        failed = {
            node: f"it has failed {many(count, 'time')}"
            for node, count in self._faults.items()
            if count >= FAULTS_OF_A_BAD_NODE
        }
        return failed | {node: why for node, (_, why) in self._excluded.items()}

    def kind_of(self, node: str) -> Kind:
        """Returns why an excluded node is that, in a word."""
        return self._excluded.get(node, ("failed", ""))[0]

    def next_world(self, *, without: str = "") -> WorldPlan | None:
        """Returns the largest world that the members who are there can make; None if there are too few.

        Nodes that are not excluded come first, then nodes with more members, then those with lower numbers.
        The node `without` counts as one that is unfit.
        """
        never = {without, *(node for node in self._excluded if self.kind_of(node) == "unfit")}
        living = [member for member in self.living if self.nodes[member] not in never]
        on_node = Counter(self.nodes[member] for member in living)
        first = {node: member for member in reversed(living) for node in (self.nodes[member],)}
        excluded = self.excluded

        def order(member: int) -> tuple[bool, int, int, int]:
            node = self.nodes[member]
            return node in excluded, -on_node[node], first[node], member

        ordered = sorted(living, key=order)
        end = bisect_right(self._sizes, min(len(living), self.wanted))
        worlds = (self._chosen(ordered, size) for size in reversed(self._sizes[:end]))
        if (chosen := next(filter(None, worlds), None)) is None:
            return None
        return WorldPlan(tuple((member, self.nodes[member]) for member in sorted(chosen)))

    def unused(self, world: WorldPlan) -> dict[str, str]:
        """Returns the excluded nodes that have no rank in the world, each with the reason."""
        used = {node for _, node in world.members}
        return {node: why for node, why in self.excluded.items() if node not in used}

    def _chosen(self, ordered: Sequence[int], size: int) -> Sequence[int]:
        """Returns the first `size` members.

        With even nodes it is those of as few excluded nodes as possible, and then of as few nodes, or none.
        """
        if not self.even_nodes:
            return ordered[:size]
        excluded = self.excluded
        on_node: dict[str, list[int]] = {}
        for member in ordered:
            on_node.setdefault(self.nodes[member], []).append(member)
        choices: list[tuple[int, list[int]]] = []
        for each in (each for each in range(size, 0, -1) if size % each == 0):
            nodes = [node for node, members in on_node.items() if len(members) >= each][: size // each]
            if len(nodes) == size // each:
                chosen = [member for node in nodes for member in on_node[node][:each]]
                choices.append((sum(node in excluded for node in nodes), chosen))
        return min(choices, key=itemgetter(0), default=(0, []))[1]


def source_of(
    kept: Mapping[int, int], nodes: Mapping[int, str], world: WorldPlan, saved_step: int
) -> tuple[int, int | None]:
    """Returns the step from which a world goes on, and the member that has to hand it over, if one has to.

    `kept` has the newest step of each member's node, `nodes` the node of each member, and `saved_step` is the
    step of the newest checkpoint. Nobody hands a step over if a node of the world has one in memory: it is
    one step older at most, and sooner done again than copied.
    """
    in_world = {node for _, node in world.members}
    near = max((step for member, step in kept.items() if nodes.get(member) in in_world), default=0)
    newest = max(kept.values(), default=0)
    if near > saved_step or newest <= saved_step:
        return max(near, saved_step), None
    return newest, min(member for member, step in kept.items() if step == newest)


@dataclass(frozen=True)
class Exclusion:
    """A node, or some of its members, without a rank, as the run folder records it."""

    node: str
    """Node, "" if its members have never joined."""
    kind: Kind
    reason: str
    """End of a sentence about the node or the members."""
    members: tuple[int, ...] = ()
    """Numbers of the members that are gone; empty: the whole node is excluded."""
    since: float = 0.0
    """Time of the first restart in a row that excluded it, in seconds since the epoch."""


def exclusions(
    membership: Membership, world: WorldPlan, before: Iterable[Exclusion], now: float
) -> tuple[Exclusion, ...]:
    """Returns who is excluded from a world; `before` were excluded from the world before it.

    `now` is in seconds since the epoch.
    """
    gone: dict[str, list[int]] = {}
    for member in sorted(membership.lost):
        gone.setdefault(membership.nodes.get(member, ""), []).append(member)
    rows = [Exclusion(node, "gone", "gone", tuple(members)) for node, members in sorted(gone.items())]
    for node, why in membership.unused(world).items():
        rows.append(Exclusion(node, membership.kind_of(node), why))
    since = {(row.node, row.kind): row.since for row in before}
    return tuple(replace(row, since=since.get((row.node, row.kind), round(now, 3))) for row in rows[:_MOST])


def exclusions_from_json(rows: Sequence[Any]) -> tuple[Exclusion, ...]:
    """Returns what a row of restarts.json has. Raises TypeError if one of them is no exclusion."""
    return tuple(Exclusion(**{**row, "members": tuple(row.get("members", ()))}) for row in rows)


def exclusions_text(rows: Any) -> list[str]:
    """Returns a phrase such as `1 supervisor on b: gone` for each of `left_out`, which comes from a file.

    What is no exclusion is passed over.
    """
    return [text for row in (rows if isinstance(rows, list | tuple) else []) if (text := _phrase(row))]


def _phrase(row: Any) -> str:
    if not isinstance(row, Mapping):
        return ""
    members = row.get("members")
    if row.get("kind") == "gone" and isinstance(members, list | tuple):
        where = f"on {row['node']}" if row.get("node") else "not seen yet"
        return f"{many(len(members), 'supervisor')} {where}: gone"
    return f"node {row.get('node')}: {row.get('reason')}"
