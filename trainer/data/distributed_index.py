"""Opens the training data on all ranks, and tells it from others.

Together they read the shards that the index lacks, each rank a part.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

from trainer.comm.protocol import Comm
from trainer.comm.rank_zero import of_each_rank, of_rank_0, raise_alike, together
from trainer.config import Data, Job, is_remote
from trainer.config.formats import FORMATS
from trainer.data.bad_samples import Allowed
from trainer.data.captions import CaptionReader
from trainer.data.entry import Entry, Selects
from trainer.data.files import Stamp, stamp
from trainer.data.index import (
    Index,
    index_folder,
    index_shards,
    lacking,
    open_index,
    versions_of,
    write_catalogue,
)
from trainer.data.indexed import Indexed
from trainer.data.sample import Source
from trainer.data.scores import forget_tables, scores_of
from trainer.data.shard_names import expand_shards
from trainer.data.shards import shard_selection
from trainer.data.source import open_source, open_with_index, selection_of
from trainer.data.targets import StoredTeacher, Targets, one_each, stored_teachers
from trainer.errors import EncodedError, StorageError
from trainer.run.folder import run_folder
from trainer.run.layout import INDEX
from trainer.text.wording import many

log = logging.getLogger("clipship")
ROUND = 256
"""Shards that a rank indexes before it waits for the others: none waits for long enough to look hung."""


def open_together(job: Job, comm: Comm) -> Source:
    """Collective: returns the samples that `[data]` names, through an index on disk for files that have one.

    Raises InputError on all ranks alike.
    """
    data = job.data
    _share_scores(data, comm)
    selection = selection_of(data)
    paths = _same_files(data, comm) if data.train else []
    if data.streams:
        return _open_streams(job, comm, paths)
    if selection is None:
        return open_source(data)
    index = _index_together(job, comm, paths, selection)
    forget_tables()
    return open_with_index(index, data, Allowed.by(data))


def open_targets(job: Job, source: Source, comm: Comm) -> Targets | None:
    """Collective: returns what teachers have stored of the samples; None if the job names nothing of that.

    Each rank looks at the files of a part of the shards. Raises InputError on all ranks alike.
    """
    if not job.model.targets:
        return None
    assert isinstance(source, Indexed)
    index = source.index
    versions = {
        path: Stamp(entry.size, entry.changed) for path, entry in zip(index.paths, index.entries, strict=True)
    }
    rank, ranks = comm.world.rank, comm.world.size
    of_ranks = together(comm, lambda: stored_teachers(job, versions, rank, ranks))
    of_folders = map(chain.from_iterable, zip(*of_ranks, strict=True))
    teachers = one_each([[StoredTeacher(*each) for each in of_folder] for of_folder in of_folders])
    return Targets(job, index, teachers)


def _same_files(data: Data, comm: Comm) -> list[str]:
    """Collective: returns the files that `data.train` names, which all ranks must see alike."""
    paths: list[str] = []

    def seen() -> tuple[int, str]:
        paths[:] = expand_shards(data.train)
        return len(paths), blake2b("\n".join(paths).encode("utf-8", "surrogateescape")).hexdigest()

    of_ranks = together(comm, seen)
    if (rank := next((rank for rank, each in enumerate(of_ranks) if each != of_ranks[0]), None)) is not None:
        raise StorageError(
            f"data.train: rank 0 finds {many(of_ranks[0][0], 'file')}, and rank {rank} {of_ranks[rank][0]:,} "
            "or others: nodes may see new files late, or have folders of their own. Start again when all see "
            "the same, or name the files with braces ({0000..0099})."
        )
    return paths


def _share_scores(data: Data, comm: Comm) -> None:
    """Collective: tells all ranks which scores these are, for which rank 0 alone reads them."""
    if not data.scores:
        return

    def found() -> str:
        scores = scores_of(data)
        return scores.identity if scores else ""

    identity = of_rank_0(comm, found)
    scores_of(data, identity)


def _index_together(job: Job, comm: Comm, paths: Sequence[str], selection: Selects) -> Index:
    """Collective: returns the index on disk, brought up to date by all ranks."""
    far = _versions(comm, list(filter(is_remote, paths)))
    folder_name, missing = of_rank_0(comm, lambda: _plan(job, paths, far, selection))
    folder = Path(folder_name)
    fresh = _index(comm, missing, selection, folder) if missing else {}
    return open_index(paths, selection, folder, fresh)


def _versions(comm: Comm, paths: Sequence[str]) -> dict[str, Stamp]:
    """Collective: returns the present versions of far files.

    Each rank asks for a part: a request for each of 100,000 would take one rank minutes.
    """
    if not paths:
        return {}
    ranks = comm.world.size
    parts = together(comm, lambda: [*versions_of(paths[comm.world.rank :: ranks]).values()])
    found = {
        path: Stamp(*version)
        for rank, versions in enumerate(parts)
        for path, version in zip(paths[rank::ranks], versions, strict=True)
    }
    return {path: found[path] for path in paths}


def _plan(
    job: Job, paths: Sequence[str], far: Mapping[str, Stamp], selection: Selects
) -> tuple[str, dict[str, Stamp]]:
    """Returns the index's folder and the shards that it lacks, with their versions. Raises InputError.

    `far` has the versions of those that lie behind addresses. What is returned can be sent to other ranks.
    """
    here = versions_of([path for path in paths if path not in far])
    versions = {path: here.get(path) or far[path] for path in paths}
    own = run_folder(job).absolute() / INDEX
    folder = Path(job.data.index) if job.data.index else index_folder(paths) or own
    missing = lacking(versions, selection, folder)
    # The index belongs to somebody else and is out of date.
    if missing and not job.data.index and folder.exists() and not os.access(folder, os.W_OK):
        folder, missing = own, lacking(versions, selection, own)
    if missing:
        log.info(
            "%-12s reading the headers of %d of %d shards; the index is kept in %s for later runs",
            "index",
            len(missing),
            len(paths),
            folder,
        )
    return str(folder), missing


def _open_streams(job: Job, comm: Comm, paths: Sequence[str]) -> Source:
    from trainer.data.streams import PROMISES, open_streams

    log.warning("%-12s %s", "streams", PROMISES)
    samples = job.data.stream_samples or 0
    window, most_bytes = job.data.shuffle_window, job.data.max_member_bytes
    rank, ranks, captions = comm.world.rank, comm.world.size, CaptionReader.by(job.data)
    selection = shard_selection(job.data)
    return open_streams(paths, samples, selection, window, job.seed, rank, ranks, most_bytes, captions)


def _index(comm: Comm, missing: Mapping[str, Stamp], selection: Selects, folder: Path) -> dict[str, Entry]:
    """Collective: indexes the shards that are missing and returns the entries of all ranks.

    Each rank reads its part of the shards, and rank 0 writes the catalogue.
    """
    shards, entries, problems = list(missing.items()), dict[str, Entry](), list[EncodedError | None]()
    of_round = ROUND * comm.world.size
    for begin in range(0, len(shards), of_round):
        own = shards[begin : begin + of_round][comm.world.rank :: comm.world.size]
        found, of_ranks = of_each_rank(comm, partial(_indexed, comm, own, selection, folder))
        problems += of_ranks
        entries |= {name: Entry(**entry) for each in found if each for name, entry in each.items()}
        comm.heartbeat.begin_phase("init")
    raise_alike(problems)
    of_rank_0(comm, partial(write_catalogue, folder, selection, entries))
    return entries


def _indexed(
    comm: Comm, shards: Sequence[tuple[str, Stamp]], selection: Selects, folder: Path
) -> dict[str, dict[str, Any]]:
    """Indexes a rank's shards; returns their entries as values that can be sent to the other ranks."""
    versions = {path: Stamp(*version) for path, version in shards}
    # Each shard that is read starts the phase's time limit anew.
    entries = index_shards(versions, selection, folder, lambda done, of: comm.heartbeat.begin_phase("init"))
    return {name: asdict(entry) for name, entry in entries.items()}


def data_rows(data: Data, source: Source, targets: Targets | None = None) -> list[object]:
    """Returns values that differ if the data's files do; none for data without files, and for streams.

    Names and times of change are left out: a copy, on a node's own disk for example, is the same data. So is
    what only an index says, which another release may write in another way. Raises OSError.
    """
    if isinstance(source, Indexed):
        entries = source.index.entries
        scores = scores_of(data)
        beside = [scores.identity] if scores else []
        beside += [teacher.made_by for teacher in targets.teachers] if targets else []
        return [*((entry.size, len(entry)) for entry in entries), *beside]
    if data.streams or not FORMATS[data.kind].unit:
        return []
    return [[stamp(path).size for path in expand_shards(data.train)], source.shard_sizes()]
