"""Writes the features of shards, each shard by one rank: `clipship embed`.

A shard is cut into blocks of `eval.batch_size` samples from its own begin, so that its features are the same
on any rank. What is there of the same model is kept: after an end of any kind the next start goes on.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.comm.protocol import Comm
from trainer.comm.rank_zero import of_rank_0
from trainer.config import Job
from trainer.data.bad_samples import ANY, SHOWN, Allowed, NothingUsable
from trainer.data.eval_blocks import RetrievalBlock
from trainer.data.feature_files import (
    About,
    Dtype,
    FeatureRows,
    FeatureWriter,
    about_model,
    feature_files,
    kept_files,
    version_of,
)
from trainer.data.files import Stamp
from trainer.data.sample import BadSample, LeftOut
from trainer.data.shard_names import expand_shards
from trainer.data.source import Source, open_source
from trainer.data.views import Views, crop_of_views
from trainer.evaluate.features import (
    block_features,
    captioned_blocks,
    evaluating,
    text_features,
)
from trainer.evaluate.rounds import Progress, Rounds, stop_of
from trainer.evaluate.trained import log_work, trained_clip
from trainer.model.build import Clip
from trainer.text.wording import many

log = logging.getLogger("clipship")


def embed(job: Job, comm: Comm, dtype: Dtype, out: str = "", views: str = "0") -> dict[str, Any]:
    """Collective: writes the features of the shards that `eval.retrieval` names, beside them or into `out`.

    With views, those of so many pictures of each sample, as the job's [data] augments them.
    Returns the number of shards and of those that were there, of samples and rows, the bad samples by cause
    and some of their names. Raises InputError, and Preempted if a stop is asked for.
    """
    log_work(job, comm)
    files = feature_files(expand_shards(job.retrieval_data.train), out or None)
    model = about_model(job, dtype, int(views))
    comm.heartbeat.begin_stage("data index")
    kept = _kept(files, model, comm)
    left = [shard for shard in files if shard not in kept]
    if kept:
        log.info("%-12s %s of %s there already", "features", many(len(kept), "shard"), f"{len(files):,}")
    job, clip = trained_clip(job, comm)
    shards = _Shards(job, clip, comm, dtype, _with_head(model, job, clip, comm))
    rounds, progress = Rounds(comm, stop_of(comm)), Progress("embed", len(left), "shards written")
    mine = islice(left, comm.world.rank, None, comm.world.size)
    with evaluating(clip.model):
        for _ in rounds.while_any(rounds.until_failed(shards.blocks(mine, files))):
            progress.done(len(shards.done) * comm.world.size)
    ranks = comm.all_gather_object([[asdict(about) for about in shards.done], shards.examples])
    written = [About(**about) for of_rank, _ in ranks for about in of_rank]
    every = [*kept.values(), *written]
    return {
        "shards": len(files),
        "kept": len(kept),
        "samples": sum(about.samples for about in every),
        "rows": sum(about.rows for about in every),
        "bad_samples": dict(sum((Counter(about.bad) for about in every), Counter())),
        "examples": [text for _, examples in ranks for text in examples][:SHOWN],
    }


def _kept(files: Mapping[str, str], model: About, comm: Comm) -> dict[str, About]:
    """Collective: returns what rank 0 finds of the files. Raises its InputError on all ranks."""
    kept = of_rank_0(
        comm, lambda: {shard: asdict(about) for shard, about in kept_files(files, model).items()}
    )
    return {shard: About(**about) for shard, about in kept.items()}


def _with_head(about: About, job: Job, clip: Clip, comm: Comm) -> About:
    """Returns what files say of the model, with what is known when it is built.

    A shard without a usable sample does not tell how many values a feature has.
    """
    width = text_features(clip, clip.tokenizer([""]), job.model.precision, comm.device).shape[1]
    model: Any = clip.model
    scale, bias = model.logit_scale.exp().item(), getattr(model, "logit_bias", None)
    learned = None if bias is None or clip.new_bias else bias.item()
    return replace(about, width=width, logit_scale=scale, logit_bias=learned)


class _Shard(NamedTuple):
    """A shard that was opened, and its blocks, which loader processes read."""

    name: str
    version: Stamp
    samples: int
    left_out: LeftOut
    blocks: Iterator[RetrievalBlock]


def _begin(opened: "Future[_Shard | None]") -> "_Shard | None":
    """Returns the shard whose first block is there: its loader processes are at work."""
    its = opened.result()
    return its and its._replace(blocks=chain(list(islice(its.blocks, 1)), its.blocks))


class _Shards:
    """Embeds the shards of one rank."""

    def __init__(self, job: Job, clip: Clip, comm: Comm, dtype: Dtype, model: About) -> None:
        self._job, self._clip, self._comm, self._dtype, self._model = job, clip, comm, dtype, model
        self._size = job.eval.batch_size
        self._shape = (*[model.views] * bool(model.views), model.width)
        self._views: Views | None = None
        if model.views:
            crop = crop_of_views(clip.images.crop)
            self._views = Views(crop, model.views, job.seed, clip.mean, clip.std)
        self.done: list[About] = []
        """Files that were written."""
        self.examples: list[str] = []
        """Some bad samples, for a message."""

    def blocks(self, shards: Iterator[str], files: Mapping[str, str]) -> Iterator[None]:
        """Embeds the shards one after the other; yields after each block of samples.

        Beside one shard a thread opens the next one, and has its loader processes begin when those of the
        first have their last blocks.
        """
        with ThreadPoolExecutor(1, "next shard") as thread:
            its = self._open(shards)
            while its is not None:
                self._comm.heartbeat.begin_phase("evaluation")  # its time limit is that of one shard
                opened, begun = thread.submit(self._open, shards), None
                writer, numbers = FeatureWriter(its.name, self._dtype), range(its.samples)
                writer.add(_lost((), (), self._shape))  # a shard without any has a file, too
                counts = Counter[str](its.left_out.by_cause)
                self._show(its.left_out.named)
                samples = rows = 0
                for block in its.blocks:
                    own, numbers = numbers[: self._size], numbers[self._size :]
                    if begun is None and len(numbers) <= self._size * self._job.data.workers:
                        begun = thread.submit(_begin, opened)
                    found = self._rows(block, own)
                    writer.add(found)
                    samples, rows = samples + block.valid, rows + len(found.keys)
                    counts.update(bad.cause for bad in block.bad)
                    self._show(block.bad)
                    yield
                about = replace(
                    self._model,
                    **its.version._asdict(),
                    samples=samples,
                    rows=rows,
                    bad=dict(counts),
                )
                writer.write(files[its.name], about)
                self.done.append(about)
                its = (begun or opened).result()

    def _open(self, shards: Iterator[str]) -> "_Shard | None":
        """Returns the next shard; None if there is no other."""
        name = next(shards, None)
        if name is None:
            return None
        version = version_of(name)
        try:
            source = self._source(name)
        except NothingUsable as nothing:
            return _Shard(name, version, 0, nothing.left_out, iter(()))
        blocks = captioned_blocks(self._clip, source, self._job, pictures=self._views)
        return _Shard(name, version, len(source), source.left_out, blocks)

    def _show(self, bad: Sequence[object]) -> None:
        self.examples += map(str, bad[: SHOWN - len(self.examples)])

    def _source(self, shard: str) -> Source:
        data = self._job.retrieval_data
        allowed = ANY if data.on_bad_sample == "skip" else Allowed.by(data)
        return open_source(data.model_copy(update={"train": (shard,)}), allowed=allowed)

    def _rows(self, block: RetrievalBlock, numbers: range) -> FeatureRows:
        """Returns the rows of the samples of a block, which have these numbers, in their order."""
        lost = sorted(set(numbers) - set(block.numbers))
        parts = self._usable(block), _lost(lost, block.bad, self._shape)
        order = np.argsort(np.concatenate([part.numbers for part in parts]), kind="stable")
        pairs: Iterator[Any] = zip(*parts, strict=True)
        return FeatureRows(*(np.concatenate(pair)[order] for pair in pairs))

    def _usable(self, block: RetrievalBlock) -> FeatureRows:
        images, texts = torch.zeros(0, *self._shape), torch.zeros(0, self._shape[-1])
        if block.valid:
            found = block_features(self._clip, block, self._job, self._comm.device)
            images, texts = (features.float().cpu() for features in found)
        numbers = block.image_of_caption.long()
        of_image = torch.searchsorted(torch.tensor(block.numbers).long(), numbers)
        images = images[of_image]
        of_views = images.double().reshape(len(images), self._model.views or 1, self._model.width)
        cosines = torch.nn.functional.cosine_similarity(of_views, texts.double()[:, None], dim=2).mean(1)
        return FeatureRows(
            numbers.numpy(),
            (torch.arange(len(numbers)) - torch.searchsorted(numbers, numbers)).numpy(),
            _objects([block.keys[number] for number in of_image.tolist()]),
            _objects([None] * len(numbers)),
            images.numpy(),
            texts.numpy(),
            cosines.float().numpy(),
        )


def _lost(numbers: Sequence[int], bad: Sequence[BadSample], shape: Sequence[int]) -> FeatureRows:
    """Returns a row for each sample that cannot be used; they have these numbers."""
    lost = np.array(numbers, dtype=np.int64)
    images, nothing = (np.zeros((len(lost), *each), dtype=np.float32) for each in (shape, shape[-1:]))
    keys, problems = _objects([sample.key for sample in bad]), _objects([sample.what for sample in bad])
    return FeatureRows(lost, np.zeros_like(lost), keys, problems, images, nothing, nothing[:, 0])


def _objects(values: Sequence[str | None]) -> NDArray[np.object_]:
    return np.array(values, dtype=object)
