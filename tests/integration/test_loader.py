"""The loader with real loader processes.

Batches stay the same, errors name their cause, and ranks that MPI started can use it.
"""

import json
import os
import re
import signal
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.support.loader_rank import load, samples
from tests.support.start import STARTS, told
from trainer.config import Data
from trainer.data.loader import Batch
from trainer.data.pack import write_shard
from trainer.data.processes import start_process_server
from trainer.data.source import open_source
from trainer.demo.data import pack_digits
from trainer.errors import InputError, MachineError


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pattern of the shards of 1,438 digits."""
    start_process_server()
    return pack_digits(tmp_path_factory.mktemp("data") / "digits").train


def digest(batches: Iterator[Batch]) -> str:
    """Returns the hash of every byte and every name in the batches, in order."""
    found = blake2b()
    for batch in batches:
        found.update(
            batch.images.numpy().tobytes()
            + batch.tokens.numpy().tobytes()
            + batch.positions.numpy().tobytes()
        )
        found.update(
            json.dumps(
                [batch.epoch, batch.batch_in_epoch, batch.micro_batch, batch.captions, batch.keys]
            ).encode()
        )
    return found.hexdigest()


@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create 4 worker processes:UserWarning"
)  # more than cores: meant
def test_any_number_of_loader_processes_gives_the_same_bytes(digits: str) -> None:
    source = open_source(Data(train=(digits,)))
    assert len({digest(load(source, workers=workers)) for workers in (0, 1, 4)}) == 1
    assert digest(load(source, workers=1, rank=1)) != digest(load(source, workers=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_picture_is_bad_input_without_a_workers_traceback(tmp_path: Path, workers: int) -> None:
    broken = {"png": b"not a picture", "txt": b"a caption"}
    write_shard(((f"{number:03d}", broken) for number in range(64)), tmp_path / "0.tar")
    with pytest.raises(InputError) as caught:
        list(load(open_source(Data(train=(str(tmp_path / "0.tar"),))), workers=workers))
    assert re.fullmatch(
        r".*/0\.tar: sample \d{3}: the image has an unknown format: 13 bytes .*", str(caught.value)
    )


def test_the_death_of_a_loader_process_is_told(digits: str) -> None:
    stream = load(open_source(Data(train=(digits,))), workers=1)
    next(stream)
    (worker,) = active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(MachineError, match=r"a loader process died .*out-of-memory"):
        list(stream)
    assert _MultiProcessingDataLoaderIter._try_get_data.__defaults__ == (0.5,), "torch looks that often"


def test_loader_processes_end_with_their_iterator(digits: str) -> None:
    stream = load(open_source(Data(train=(digits,))), workers=2)
    next(stream)
    assert len(active_children()) == 2
    del stream
    assert active_children() == []


def test_80_epochs_leave_memory_and_open_files_as_they_were(digits: str) -> None:
    """Memory and open files are counted for the rank and for its loader processes."""
    (shard, *_) = sorted(Path(digits).parent.glob("*.tar"))
    source = open_source(Data(train=(str(shard),)))
    stream = load(source, workers=2, epochs=80)
    an_epoch = len(source) // 64 * 2
    assert an_epoch

    def taken() -> list[tuple[int, int]]:
        """Open files and bytes of its own, by process.

        Bytes are counted as anonymous, not as private: pages of a library become private to a process
        as soon as the last other one that has them ends, some 200 MB with torch's.
        """
        found = []
        for pid in [os.getpid(), *(process.pid for process in active_children())]:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            (own,) = re.findall(r"^Anonymous:\s+(\d+) kB", rollup, re.MULTILINE)
            found.append((len(os.listdir(f"/proc/{pid}/fd")), int(own) * 1024))
        return found

    for _ in range(20 * an_epoch):
        next(stream)
    before = taken()
    assert len(before) == 3
    batches = sum(1 for _ in islice(stream, 59 * an_epoch))
    after = taken()
    assert batches == 59 * an_epoch
    for (files, own), (files_after, own_after) in zip(before, after, strict=True):
        assert abs(files_after - files) <= 8, "batches under way have a file each"
        assert own_after - own < 2**24


def shard_ranks(backend: str, launcher: str) -> Any:
    often = (backend, launcher) == ("torch", "clipship")  # what a rank reads follows from its number alone
    marks = (
        [pytest.mark.mpi] * (launcher == "mpirun")
        + [pytest.mark.full] * (not often)
        + [pytest.mark.horovod] * (backend == "horovod")
    )
    return pytest.param(backend, launcher, marks=marks)


@pytest.mark.parametrize(("backend", "launcher"), [shard_ranks(*pair) for pair in STARTS])
def test_ranks_share_an_epoch_that_one_process_would_see(digits: str, backend: str, launcher: str) -> None:
    (per_rank,) = told(backend, launcher, 2, "tests.support.loader_rank", backend, digits)
    assert [len(of_rank) for of_rank in per_rank] == [704, 704]
    together = sorted(tuple(found) for of_rank in per_rank for found in of_rank)
    assert len({key for _, key, _, _ in together}) == 1408
    assert together == samples(load(open_source(Data(train=(digits,))), ranks=1, accumulation=1))
