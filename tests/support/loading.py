"""What most tests of data begin with: shards, their samples through an index, and the batches of a rank."""

import io
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.jobs import tiny_job
from tests.support.thread_ranks import one_rank, run_ranks
from trainer.config import Data
from trainer.config.batch_plan import BatchPlan
from trainer.data.distributed_index import open_together
from trainer.data.index import stale
from trainer.data.lanes import Lanes
from trainer.data.loader import Batch, train_batches
from trainer.data.sample import RawSample, Source
from trainer.data.source import selection_of
from trainer.errors import InputError

Member = tuple[str, bytes]


def write_tar(path: Path, members: Sequence[Member], tar_format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def pair(key: str, caption: str = "a caption") -> list[Member]:
    """The members of a sample."""
    return [(f"{key}.jpg", f"image of {key}".encode()), (f"{key}.txt", caption.encode())]


def open_indexed(paths: Sequence[str], folder: Path, **data: Any) -> Any:
    """Opens files as a run of one rank does, through an index in the folder, which it brings up to date."""
    return open_job(train=tuple(paths), index=str(folder), **data)


def open_job(ranks: int = 1, rank: int = 0, seed: int = 0, **data: Any) -> Any:
    """Opens what [data] names as a rank does."""
    job = tiny_job(data={"format": "auto", **data}).model_copy(update={"seed": seed})
    if ranks == 1:
        alone: Any = one_rank()
        return open_together(job, alone)
    return run_ranks(ranks, lambda comm: open_together(job, comm))[rank]


def unindexed(paths: Sequence[str], folder: Path, **data: Any) -> list[str]:
    """Those that `clipship index` would read, which itself reads none of them."""
    selection = selection_of(Data(train=tuple(paths), **data))
    assert selection is not None
    return list(stale(paths, selection, folder))


def keys_of(source: Source) -> list[str]:
    return [source.read(number).key for number in range(len(source))]


def refusal(call: Callable[..., object], *arguments: Any, **keys: Any) -> str:
    """The message of the bad input that a call ends with."""
    with pytest.raises(InputError) as caught:
        call(*arguments, **keys)
    return str(caught.value)


def plain(raw: RawSample, seed: int) -> Tensor:
    """The file's bytes as a picture, and one that the position decides."""
    assert isinstance(raw.image, bytes)
    content = bytearray(raw.image + bytes([seed % 256]))
    return torch.frombuffer(content, dtype=torch.uint8).view(1, 1, -1)


def lengths(texts: list[str]) -> Tensor:
    return torch.tensor([[len(text)] for text in texts])


def plan_of(ranks: int, batch: int, accumulation: int = 1) -> BatchPlan:
    return BatchPlan(ranks, batch, batch // ranks, batch // ranks // accumulation, accumulation)


def rank_batches(
    source: Source, order: tuple[int, int], batch: int, ranks: int = 1, accumulation: int = 1, **how: Any
) -> Iterator[Batch]:
    """The micro-batches of a rank, of blocks of so many samples in so many lanes."""
    keys: dict[str, Any] = {"rank": 0, "seed": 3, "pixels": plain, "tokenizer": lengths, "workers": 0, **how}
    return train_batches(source, plan=plan_of(ranks, batch, accumulation), order=Lanes(*order), **keys)
