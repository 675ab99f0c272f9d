"""Finds where ranks that are started again go on: at the newest step in the memory of any node.

Each node's first rank says which steps its node has kept whole, with their checksums. The newest one wins if
all that have it agree about it; a step about which they differ is not trusted, and it is said. The first rank
that has the step reads it, and the others get weights and optimizer from it over the backend, so a node that
is new, or that missed the step, needs nothing from the disk. If no node with a rank has a step that is
trusted (those that had one are lost or left out), the newest checkpoint on the disk is the fallback; it also
wins if it is newer.

The value of the best metric so far comes from the disk all the same: it belongs to a checkpoint there.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.identity import RunIdentity
from trainer.checkpoint.memory_state import Kept, clear, forget, kept_steps
from trainer.checkpoint.state import TrainState
from trainer.comm.backends import keeps_in_memory
from trainer.comm.protocol import Comm
from trainer.comm.replicas import broadcast_replicas
from trainer.config import Job
from trainer.errors import InputError
from trainer.world.rendezvous import Rendezvous
from trainer.world.state_folder import STATE_DIR
from trainer.world.state_parts import BUFFERS
from trainer.world.state_parts import newest_step as newest_kept

log = logging.getLogger("clipship")


@dataclass(frozen=True)
class FromMemory:
    """Start at a step that was kept in memory, equal on all ranks but for `first_buffer`."""

    step: int
    node: str
    """Node whose copy was taken."""
    saved_step: int
    """Step of the newest checkpoint on disk, 0 if there is none."""
    record: Mapping[str, Any] | None
    """Line of metrics.jsonl of the step, which may not have been written; None if none was due."""
    every: int | None
    """Every how many steps the ranks before kept one; None if they had not chosen yet."""
    first_buffer: int
    """Buffer of this rank's node that may be overwritten."""
    bad_samples: Mapping[str, int] = field(default_factory=dict)
    """Number of samples that the run has skipped until that step, by cause, but for lost nodes' last ones."""
    order: Mapping[str, int] | None = None
    """The fields of the run's lanes; None if they may be chosen."""


@dataclass(frozen=True)
class NodeMemory:
    """The folder of this rank's node, and this rank's part of what is kept there."""

    folder: Path | None
    """None if this node has no folder: its supervisor could not make one, or there is no supervisor."""
    start: str
    part: int
    parts: int
    leader: int
    """First rank of the node, which reads for all of them."""
    kept: tuple[Kept, ...] = ()
    """Whole steps in the folder, the newest first; only the leader has looked."""
    had_any: bool = False
    """True if a step was promised, whatever became of it."""


@dataclass(frozen=True)
class Choice:
    """Step to go on from; `step` 0 means the disk."""

    step: int = 0
    root: int = 0
    """First rank that has it."""
    distrusted: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Ranks by step, for each newer step about which those that have it differ."""


Offer = Sequence[tuple[int, str]]
"""Step and digest of each whole step that a rank has found."""


def node_memory(job: Job, comm: Comm, env: Mapping[str, str]) -> NodeMemory | None:
    """Collective: finds this node's folder and what it holds; None if the job keeps nothing in memory.

    A folder that one supervisor of a node could not share is a folder of its own ranks alone.
    """
    if not keeps_in_memory(job):
        return None
    rendezvous = Rendezvous.from_env(env)
    given = env.get(STATE_DIR, "") if rendezvous is not None else ""
    places = comm.all_gather_object((comm.world.node, given))
    peers = [rank for rank, place in enumerate(places) if place == (comm.world.node, given)]
    start = rendezvous.start if rendezvous is not None else ""
    folder = Path(given) if given else None
    kept = kept_steps(folder, start) if folder is not None and peers[0] == comm.world.rank else []
    had_any = folder is not None and newest_kept(folder, start) > 0
    part = peers.index(comm.world.rank)
    return NodeMemory(folder, start, part, len(peers), peers[0], tuple(kept), had_any)


def emptied(memory: NodeMemory | None, comm: Comm, timeout_s: float) -> NodeMemory | None:
    """Collective: gives up all that is kept, for a state of another form; None if nothing is kept at all."""
    if memory is None:
        return None
    if memory.folder is not None and comm.world.rank == memory.leader:
        clear(memory.folder, memory.start)
    comm.barrier(timeout_s)
    return replace(memory, kept=(), had_any=False)


def choose(offers: Sequence[Offer], on_disk: int) -> Choice:
    """Returns the newest step, not older than that on disk, about which all ranks that have it agree."""
    distrusted: dict[int, list[int]] = {}
    for step in sorted({step for offer in offers for step, _ in offer}, reverse=True):
        found = [(rank, digest) for rank, offer in enumerate(offers) for of, digest in offer if of == step]
        if step < on_disk:
            break
        if len({digest for _, digest in found}) == 1:
            return Choice(step, found[0][0], distrusted)
        distrusted[step] = [rank for rank, _ in found]
    return Choice(distrusted=distrusted)


def restore_from_memory(
    comm: Comm, memory: NodeMemory, train: TrainState, on_disk: int, run: RunIdentity
) -> FromMemory | None:
    """Collective: restores weights, optimizer and scaler from a node's memory; None if the disk has to serve.

    `on_disk` is the step of the newest checkpoint there, the same on every rank. All other steps in memory
    are given up, so that none of them is taken for a step of this generation. Raises InputError on every rank
    if the step is another run's than `run`.
    """
    found = [(kept.step, kept.digest, kept.buffer, kept.skipped, kept.skipped_before) for kept in memory.kept]
    everyone = comm.all_gather_object(found)
    choice = choose([[(step, digest) for step, digest, *_ in offer] for offer in everyone], on_disk)
    for step, ranks in choice.distrusted.items():
        log.warning(
            "resume       the copies of step %d in the memory of the nodes of ranks %s differ: none is used",
            step,
            ", ".join(map(str, ranks)),
        )
    if memory.folder is not None and comm.world.rank == memory.leader:
        forget(memory.folder, memory.start, choice.step)
    if not choice.step:
        return None
    kept = next((kept for kept in memory.kept if kept.step == choice.step), None)
    before = kept.layout.run if kept and comm.world.rank == choice.root else None
    changes, other_figures = comm.broadcast_object(
        (run.changes(before), run.other_figures(before)) if before else ([], []), choice.root
    )
    for change in other_figures if comm.world.rank == 0 else ():
        log.warning("resume       %s", change)
    if changes:
        raise InputError(
            f"step {choice.step}, which a node has in memory, is another run's: {'; '.join(changes)}\n"
            "what this start reads has changed under it: put that back, and `clipship resume` goes on from "
            "the newest checkpoint"
        )
    about = comm.broadcast_object(_load(memory, choice, train, comm), choice.root)
    if isinstance(about, str):
        log.warning("resume       the copy of step %d in memory cannot be used: %s", choice.step, about)
        return None
    broadcast_replicas(comm, train.model, train.optimizer, choice.root)
    if about["scaler"] and train.scaler.is_enabled():
        train.scaler.load_state_dict({**train.scaler.state_dict(), **about["scaler"]})
    held = [buffer for step, _, buffer, *_ in everyone[memory.leader] if step == choice.step]
    bad_samples = Counter(about["skipped_before"])
    for offer in everyone:  # a node that lacks the step may have one that is almost as new
        by_step = {step: skipped for step, _, _, *skipped in offer}
        skipped, before_that = by_step.get(choice.step) or next(iter(by_step.values()), ({}, None))
        if before_that == about["skipped_before"]:  # else it is of an earlier generation, whose sum this is
            bad_samples.update(skipped)
    return FromMemory(
        step=choice.step,
        node=about["node"],
        saved_step=on_disk,
        record=about["record"],
        every=about["every"] or None,
        order=about["order"],
        first_buffer=(held[0] + 1) % BUFFERS if held else 0,
        bad_samples=bad_samples,
    )


def _load(memory: NodeMemory, choice: Choice, train: TrainState, comm: Comm) -> Mapping[str, Any] | str:
    """Returns what the chosen step says about itself, or why it cannot be loaded; its reader loads it."""
    if comm.world.rank != choice.root:
        return {}
    kept = next(kept for kept in memory.kept if kept.step == choice.step)
    try:
        scaler = kept.load(train)
    except (OSError, RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return {
        **kept.about,
        "skipped_before": kept.skipped_before,
        "scaler": scaler,
        "node": comm.world.node,
        "order": kept.layout.run.get("data_order"),
    }
