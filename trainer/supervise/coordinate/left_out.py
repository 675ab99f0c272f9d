"""Who is left out of a generation's world: members that are gone, and nodes that do badly. Pure; no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainer.supervise.coordinate.membership import Membership, WorldPlan
from trainer.text.wording import many

_MOST = 16


@dataclass(frozen=True)
class LeftOut:
    """A node, or some of its members, without a rank, as the run folder records it."""

    node: str
    kind: Literal["gone", "failed", "condemned", "unfit"]
    """gone: the members are lost; failed: the node has failed too often; condemned: it does badly; unfit: it
    has failed the preflight, and gets no rank any more."""
    reason: str
    """End of a sentence about the node or the members."""
    members: tuple[int, ...] = ()
    """Numbers of the members that are gone; empty: the whole node is left out."""
    since: float = 0.0
    """Time of the first restart in a row that left it out, in seconds since the epoch."""


def left_out(
    membership: Membership, world: WorldPlan, before: Iterable[LeftOut], now: float
) -> tuple[LeftOut, ...]:
    """Returns who is left out of a world; `before` were left out of the world before it.

    `now` is in seconds since the epoch.
    """
    gone: dict[str, list[int]] = {}
    for member in sorted(membership.lost):
        gone.setdefault(membership.nodes[member], []).append(member)
    rows = [LeftOut(node, "gone", "gone", tuple(members)) for node, members in sorted(gone.items())]
    for node, why in membership.left_out(world).items():
        rows.append(LeftOut(node, membership.mark_of(node), why))
    since = {(row.node, row.kind): row.since for row in before}
    return tuple(replace(row, since=since.get((row.node, row.kind), round(now, 3))) for row in rows[:_MOST])


def left_out_from_json(rows: Sequence[Any]) -> tuple[LeftOut, ...]:
    """Returns what a row of restarts.json has; sentences of an older version are passed over.

    Raises TypeError if a row is none.
    """
    tables = [row for row in rows if isinstance(row, Mapping)]
    return tuple(LeftOut(**{**row, "members": tuple(row.get("members", ()))}) for row in tables)


def left_out_text(rows: Any) -> list[str]:
    """Returns a phrase such as `1 supervisor on b: gone` for each of `left_out`, which comes from a file.

    A sentence of an older version is returned as it is; what is neither is passed over.
    """
    return [text for row in (rows if isinstance(rows, list | tuple) else []) if (text := _phrase(row))]


def _phrase(row: Any) -> str:
    if not isinstance(row, Mapping):
        return str(row) if isinstance(row, str) else ""
    members = row.get("members")
    if row.get("kind") == "gone" and isinstance(members, list | tuple):
        return f"{many(len(members), 'supervisor')} on {row.get('node')}: gone"
    return f"node {row.get('node')}: {row.get('reason')}"
