"""Opens the training data on all ranks: what their shards' index lacks, the ranks read together, each its part."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from trainer.comm.protocol import Comm
from trainer.data.bad import Allowed
from trainer.data.index import Entry, index_folder, index_shards, open_index, raise_all, stale, write_catalogue
from trainer.data.sample import Source
from trainer.data.shards import open_indexed
from trainer.data.source import open_source
from trainer.data.tar import Selection
from trainer.errors import InputError
from trainer.inputs import expand_shards
from trainer.inputs.run_folder import INDEX, run_folder
from trainer.job import Job

log = logging.getLogger("clipship")


def open_together(job: Job, comm: Comm) -> Source:
    """Collective: the samples that `[data]` names; shards through an index on disk. Raises InputError on all ranks alike."""
    data = job.data
    if data.kind != "webdataset":
        return open_source(data)
    paths = expand_shards(data.train)
    selection = Selection(tuple(data.image_key), data.caption_key)
    if data.streams:
        return _open_streams(job, comm, paths, selection)
    folder, missing, problem = comm.broadcast_object(_plan(job, paths, selection) if comm.world.rank == 0 else None)
    if problem:
        raise problem
    fresh = _index(comm, missing, selection, folder) if missing else {}
    return open_indexed(open_index(paths, selection, folder, fresh), "captions", Allowed.by(data))


def _plan(job: Job, paths: Sequence[str], selection: Selection) -> tuple[Path, list[str], InputError | None]:
    """Where the index is or will be, the shards that it lacks, and what is wrong."""
    beside = Path(job.data.index) if job.data.index else index_folder(paths)
    folder = beside or run_folder(job).absolute() / INDEX
    try:
        missing = stale(paths, selection, folder)
        if missing and not job.data.index and folder.exists() and not os.access(folder, os.W_OK):  # somebody else's, and out of date
            folder = run_folder(job).absolute() / INDEX
            missing = stale(paths, selection, folder)
    except InputError as error:
        return folder, [], error
    if missing:
        log.info("%-12s reading the headers of %d of %d shards, once: the index is kept in %s", "index", len(missing), len(paths), folder)
    return folder, missing, None


def _open_streams(job: Job, comm: Comm, paths: Sequence[str], selection: Selection) -> Source:
    from trainer.data.streams import PROMISES, open_streams

    log.warning("%-12s %s", "streams", PROMISES)
    samples = job.data.stream_samples or 0
    return open_streams(paths, samples, selection, job.data.shuffle_window, job.seed, comm.world.rank, comm.world.size)


def _index(comm: Comm, missing: Sequence[str], selection: Selection, folder: Path) -> dict[str, Entry]:
    """Collective: each rank reads its share of the shards, rank 0 writes the catalogue; the entries of all."""
    entries: dict[str, Entry] = {}
    problem: InputError | None = None
    try:
        own = missing[comm.world.rank :: comm.world.size]
        entries = index_shards(own, selection, folder, progress=lambda done, of: comm.pulse.phase("init"))  # each has the limit anew
    except InputError as error:
        problem = error
    found = comm.all_gather_object((entries, problem))
    problems = [problem for _, problem in found if problem]
    every = {name: entry for of_rank, _ in found for name, entry in of_rank.items()}
    if not problems and comm.world.rank == 0:
        try:
            write_catalogue(folder, selection, every)
        except InputError as error:
            problems = [error]
    problems = comm.broadcast_object(problems)
    raise_all(problems, shown=len(problems))  # each is a rank's own list
    return every
