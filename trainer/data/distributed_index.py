"""Opens the training data on all ranks.

Together they read the shards that the index lacks, each rank a part.
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TypeVar

from trainer.comm.protocol import Comm
from trainer.comm.rank_zero import of_rank_0
from trainer.config import Data, Job
from trainer.data.bad_samples import Allowed
from trainer.data.captions import CaptionReader
from trainer.data.entry import Entry, Selects
from trainer.data.files import Stamp
from trainer.data.index import (
    Index,
    index_folder,
    index_shards,
    open_index,
    raise_all,
    stale,
    write_catalogue,
)
from trainer.data.sample import Source
from trainer.data.scores import forget_tables, scores_of
from trainer.data.shard_names import expand_shards
from trainer.data.shards import shard_selection
from trainer.data.source import open_source, open_with_index, selection_of
from trainer.errors import InputError, decode_error, encode_error
from trainer.run.folder import run_folder
from trainer.run.layout import INDEX

log = logging.getLogger("clipship")
Missing = TypeVar("Missing", bound=Collection[str])


def open_together(job: Job, comm: Comm) -> Source:
    """Collective: returns the samples that `[data]` names, through an index on disk for files that have one.

    Raises InputError on all ranks alike.
    """
    data = job.data
    _share_scores(data, comm)
    selection = selection_of(data)
    if data.streams:
        return _open_streams(job, comm, expand_shards(data.train))
    if selection is None:
        return open_source(data)
    paths = expand_shards(data.train)
    index = _index_together(job, comm, paths, selection)
    forget_tables()
    return open_with_index(index, data, Allowed.by(data))


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
    folder_name, missing = of_rank_0(comm, lambda: _plan(job, paths, selection))
    folder = Path(folder_name)
    fresh = _index(comm, missing, selection, folder) if missing else {}
    return open_index(paths, selection, folder, fresh)


def index_of_run(
    job: Job, paths: Sequence[str], missing_in: Callable[[Path], Missing]
) -> tuple[Path, Missing]:
    """Returns the folder of the index that a run opens, and what `missing_in` finds to lack there."""
    beside = Path(job.data.index) if job.data.index else index_folder(paths)
    folder = beside or run_folder(job).absolute() / INDEX
    missing = missing_in(folder)
    # The index belongs to somebody else and is out of date.
    if missing and not job.data.index and folder.exists() and not os.access(folder, os.W_OK):
        folder = run_folder(job).absolute() / INDEX
        missing = missing_in(folder)
    return folder, missing


def _plan(job: Job, paths: Sequence[str], selection: Selects) -> tuple[str, dict[str, Stamp]]:
    """Returns the index's folder and the shards that it lacks, with their versions. Raises InputError."""
    folder, missing = index_of_run(job, paths, lambda folder: stale(paths, selection, folder))
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
    entries: dict[str, Entry] = {}
    problem: InputError | None = None
    try:
        shards = islice(missing.items(), comm.world.rank, None, comm.world.size)
        own = {path: Stamp(*version) for path, version in shards}
        # Each shard that is read starts the phase's time limit anew.
        entries = index_shards(
            own, selection, folder, progress=lambda done, of: comm.heartbeat.begin_phase("init")
        )
    except InputError as error:
        problem = error
    gathered = comm.all_gather_object(
        ({name: asdict(entry) for name, entry in entries.items()}, encode_error(problem))
    )
    encoded = [problem for _, problem in gathered if problem]
    every = {name: Entry(**entry) for of_rank, _ in gathered for name, entry in of_rank.items()}
    if not encoded and comm.world.rank == 0:
        try:
            write_catalogue(folder, selection, every)
        except InputError as error:
            encoded = [encode_error(error)]
    decoded = map(decode_error, comm.broadcast_object(encoded))
    problems = [error for error in decoded if isinstance(error, InputError)]
    raise_all(problems, shown=len(problems))  # each problem is a rank's own list
    return every
