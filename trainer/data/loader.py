"""Batches for a rank: reads, decodes, augments and tokenises in loader processes. Knows its rank and world by argument only.

Names neither torch.distributed nor Horovod, and imports nothing of the launcher. What a batch holds follows from seed, epoch and
position; the number of loader processes changes nothing but speed.
"""

import io
import multiprocessing
import multiprocessing.forkserver
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainer.data.order import epoch_order, position_seed
from trainer.data.sample import RawSample, Source
from trainer.errors import InputError
from trainer.plan import Plan

Transform = Callable[[Image.Image], Tensor]
"""A picture to float32 [3, height, width]; picklable. Random ones may draw from torch, random and numpy."""
Tokenizer = Callable[[list[str]], Tensor]
"""Captions to int64 [captions, context length]; picklable."""
Loaded = TypeVar("Loaded")
# What a loader process needs, imported once in the server that they fork from instead of once in each.
PRELOADED = ["__main__", "torchvision.transforms", "open_clip", "trainer.data.loader"]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a rank, in the order of the epoch."""

    images: Tensor
    """float32 [samples, 3, height, width]"""
    tokens: Tensor
    """int64 [samples, context length]"""
    epoch: int
    batch_in_epoch: int
    """Number of the global batch within its epoch."""
    micro_batch: int
    """Number within the rank's share of that global batch."""
    positions: Tensor
    """int64 [samples]: places in the order of the epoch."""
    captions: list[str]
    keys: list[str]

    def pin_memory(self) -> "Batch":
        """Called by torch's loader: page-locked tensors copy to the GPU without waiting."""
        return replace(self, images=self.images.pin_memory(), tokens=self.tokens.pin_memory())


class EvalBlock(NamedTuple):
    """`block` images in a row, whatever the world: the samples first .. first + valid - 1, then zeros with label -1."""

    images: Tensor
    """float32 [block, 3, height, width]"""
    labels: Tensor
    """int64 [block]"""
    valid: int
    first: int


def start_process_server() -> None:
    """Call early where loader processes will be used: their server's imports take seconds, which may pass beside other work."""
    _process_context()
    multiprocessing.forkserver.ensure_running()


def batches_per_epoch(source: Source, plan: Plan) -> int:
    """Global batches of one epoch; samples that do not fill one are left to another epoch's order. InputError where none is full."""
    if len(source) < plan.global_batch_size:
        raise InputError(
            f"optim.global_batch_size = {plan.global_batch_size} is more than the {len(source)} usable samples of data.train: "
            f"use {len(source)} or less, or more data"
        )
    return len(source) // plan.global_batch_size


def train_batches(
    source: Source,
    *,
    plan: Plan,
    rank: int,
    seed: int,
    window: int,
    transform: Transform,
    tokenizer: Tokenizer,
    workers: int,
    epochs: int | None = None,
    start_epoch: int = 0,
    start_batch: int = 0,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """The rank's micro-batches, `plan.accumulation` for each global batch, from a place in an epoch to the end of epoch `epochs` - 1.

    `epochs` None never ends. Over the ranks no sample comes twice in an epoch. Raises InputError for what cannot be read or decoded.
    """
    batches = batches_per_epoch(source, plan)
    if not 0 <= start_batch < batches:
        raise ValueError(f"start_batch {start_batch} of {batches} batches")
    requests = TrainRequests(
        source.shard_sizes(),
        plan,
        rank,
        seed,
        window,
        batches,
        epochs,
        start_epoch,
        start_batch,
    )
    return load(TrainBatches(source, seed, transform, tokenizer), requests, workers, pin_memory)


def eval_blocks(
    source: Source,
    *,
    rank: int,
    world_size: int,
    block: int,
    transform: Transform,
    workers: int,
    pin_memory: bool = False,
) -> Iterator[EvalBlock]:
    """Every `world_size`-th block of `block` samples: any number of samples, and no block at all for ranks that none is left for."""
    firsts = range(rank * block, len(source), world_size * block)
    return load(
        EvalBlocks(source, block, transform),
        firsts,
        min(workers, len(firsts)),
        pin_memory,
    )


class TrainRequest(NamedTuple):
    """Which samples make one micro-batch: `positions` and `samples` are int64 [samples]."""

    epoch: int
    batch_in_epoch: int
    micro_batch: int
    positions: np.ndarray[Any, np.dtype[np.int64]]
    samples: np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class TrainRequests:
    """The requests of one rank, in order."""

    shard_sizes: Sequence[int]
    plan: Plan
    rank: int
    seed: int
    window: int
    batches: int
    epochs: int | None
    start_epoch: int
    start_batch: int

    def __iter__(self) -> Iterator[TrainRequest]:
        epoch, batch = self.start_epoch, self.start_batch
        while self.epochs is None or epoch < self.epochs:
            order = epoch_order(self.shard_sizes, seed=self.seed, epoch=epoch, window=self.window)
            for number in range(batch, self.batches):
                yield from self._of_batch(order, epoch, number)
            epoch, batch = epoch + 1, 0

    def _of_batch(self, order: np.ndarray[Any, np.dtype[np.int64]], epoch: int, batch: int) -> Iterator[TrainRequest]:
        first = batch * self.plan.global_batch_size + self.rank * self.plan.batch_size_per_rank
        for micro_batch in range(self.plan.accumulation):
            begin = first + micro_batch * self.plan.micro_batch_size
            positions = np.arange(begin, begin + self.plan.micro_batch_size)
            yield TrainRequest(epoch, batch, micro_batch, positions, order[positions])


class TrainBatches(Dataset[Batch | InputError]):
    """Turns requests into batches, inside a loader process."""

    def __init__(self, source: Source, seed: int, transform: Transform, tokenizer: Tokenizer) -> None:
        self._source = source
        self._seed = seed
        self._transform = transform
        self._tokenizer = tokenizer

    def __getitem__(self, request: TrainRequest) -> Batch | InputError:
        try:
            return self._batch(request)
        except InputError as error:
            return error

    def _batch(self, request: TrainRequest) -> Batch:
        raws = [self._source.read(sample) for sample in request.samples.tolist()]
        positions = request.positions.tolist()
        captions = [self._caption(raw, request.epoch, position) for raw, position in zip(raws, positions, strict=True)]
        with random_state_kept():
            images = torch.stack([self._image(raw, request.epoch, position) for raw, position in zip(raws, positions, strict=True)])
        keys = [raw.key for raw in raws]
        return Batch(
            images,
            self._tokenizer(captions),
            *request[:3],
            torch.from_numpy(request.positions),
            captions,
            keys,
        )

    def _caption(self, raw: RawSample, epoch: int, position: int) -> str:
        return raw.captions[position_seed(self._seed, epoch, position, "caption") % len(raw.captions)]

    def _image(self, raw: RawSample, epoch: int, position: int) -> Tensor:
        picture = decode(raw)
        seed_transforms(position_seed(self._seed, epoch, position, "augmentation"))
        return self._transform(picture)


class EvalBlocks(Dataset[EvalBlock | InputError]):
    """Turns the number of a block's first sample into the block, inside a loader process."""

    def __init__(self, source: Source, block: int, transform: Transform) -> None:
        self._source = source
        self._block = block
        self._transform = transform

    def __getitem__(self, first: int) -> EvalBlock | InputError:
        try:
            return self._read(first)
        except InputError as error:
            return error

    def _read(self, first: int) -> EvalBlock:
        raws = [self._source.read(index) for index in range(first, min(first + self._block, len(self._source)))]
        images = image_block(raws, self._transform, self._block)
        labels = torch.full((self._block,), -1)
        labels[: len(raws)] = torch.tensor([raw.label for raw in raws])
        return EvalBlock(images, labels, len(raws), first)


def image_block(raws: Sequence[RawSample], transform: Transform, block: int) -> Tensor:
    """float32 [block, 3, height, width]: the samples' pictures, then zeros, so that every block passes the model in the same shape."""
    pictures = torch.stack([transform(decode(raw)) for raw in raws])
    images = pictures.new_zeros(block, *pictures.shape[1:])
    images[: len(raws)] = pictures
    return images


def decode(raw: RawSample) -> Image.Image:
    """The sample's picture in RGB; InputError naming shard, key and cause where it cannot be decoded."""
    if not isinstance(raw.image, bytes):
        return Image.fromarray(raw.image)
    try:
        with Image.open(io.BytesIO(raw.image)) as picture:
            return picture.convert("RGB")
    except UnidentifiedImageError as error:
        found = f"{len(raw.image)} bytes that begin with {raw.image[:12]!r}"
        raise InputError(f"{raw.origin}: sample {raw.key}: the image is of no known format: {found}") from error
    # Decoders of damaged files raise any of these.
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        Image.DecompressionBombError,
    ) as error:
        raise InputError(f"{raw.origin}: sample {raw.key}: the image cannot be decoded: {error}") from error


def seed_transforms(seed: int) -> None:
    """Everything that a transform may draw from: torch on the CPU, random and numpy."""
    # torch.manual_seed would also seed the GPU's generator, which is the model's.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Afterwards torch on the CPU, random and numpy go on as if nothing had been drawn: with no loader process they are the model's."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def load(
    dataset: Dataset[Loaded | InputError],
    requests: Iterable[Any],
    workers: int,
    pin_memory: bool,
) -> Iterator[Loaded]:
    """The data set's answers to the requests, in order; loader processes live as long as the iterator.

    An InputError travels as a value and is raised here: torch would wrap it in a worker's traceback.
    """
    loader = DataLoader(
        dataset,
        sampler=requests,
        batch_size=None,
        num_workers=workers,
        collate_fn=_unchanged,
        pin_memory=pin_memory,
        multiprocessing_context=_process_context() if workers else None,
        worker_init_fn=_ignore_stop,
        # Its own generator: the loader would draw its base seed from the model's.
        generator=torch.Generator(),
    )
    return _unwrapped(iter(loader), workers)


def _ignore_stop(_worker: int) -> None:
    """Slurm sends SIGTERM to every process of a step, and torch has made its loader processes end by it: the rank still needs them."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _process_context() -> multiprocessing.context.BaseContext:
    """Forking the rank itself is unsafe after MPI_Init and with threads about; a server that did neither forks instead."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _unchanged(loaded: Loaded) -> Loaded:
    return loaded


def _unwrapped(loaded: Iterator[Loaded | InputError], workers: int) -> Iterator[Loaded]:
    try:
        for item in loaded:
            if isinstance(item, InputError):
                raise item
            yield item
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise RuntimeError(
            f"a loader process died ({error}). With data.workers = {workers} each rank has {workers} of them: look for the kernel's "
            "out-of-memory killer and for a small /dev/shm, try fewer workers; data.workers = 0 loads in the rank itself"
        ) from error
    finally:
        # An exception's traceback would keep the iterator, and with it the loader processes, alive.
        del loaded
