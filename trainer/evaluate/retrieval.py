"""Image-text retrieval, shared by all ranks: recall at 1, 5 and 10 and the median rank, in both directions.

Images are cut into fixed blocks, and block b belongs to rank b modulo world_size. Ranks exchange features
after each block, so nobody waits longer than a block takes; then each rank ranks its part of the images
against all texts (see `ranking`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.data.bad_samples import Skipped
from trainer.data.eval_blocks import RetrievalBlock
from trainer.data.sample import Subset
from trainer.data.source import Source
from trainer.evaluate.features import block_features, captioned_blocks, evaluating
from trainer.evaluate.ranking import ROWS, Pairs, ahead, exact
from trainer.evaluate.rounds import Progress, Rounds
from trainer.model.build import Clip

RECALLS = (1, 5, 10)


@dataclass(frozen=True)
class Retrieval:
    """Ranks from 1, int64 on the CPU. Ties are ranked by number, the lower one first."""

    of_texts: Tensor
    """Rank of the nearest of an image's own texts among all texts, [images]."""
    of_images: Tensor
    """Rank of a text's own image among all images, [texts]."""
    captions: Tensor | None = None
    """Digests of the texts' captions, int64 [texts] on the CPU; equal captions have equal ones."""
    bad: Mapping[str, int] = field(default_factory=dict)
    """Number of further images that cannot be used, by cause."""

    def metrics(self) -> dict[str, float | int]:
        """Returns the metrics under the names of result.json.

        Recall is a share; i2t is from images to texts, t2i back.
        """
        metrics: dict[str, float | int] = {
            "retrieval_images": len(self.of_texts),
            "retrieval_texts": len(self.of_images),
            **({"retrieval_bad_samples": sum(self.bad.values())} if self.bad else {}),
        }
        for name, ranks in (("i2t", self.of_texts), ("t2i", self.of_images)):
            metrics |= {f"retrieval_{name}_r{k}": int((ranks <= k).sum()) / len(ranks) for k in RECALLS}
            metrics[f"retrieval_{name}_median_rank"] = median(ranks)
        return metrics

    def of_queries(self) -> Tensor:
        """Returns the rank of the nearest of each different caption's own images, [different captions].

        A query that several images answer is found if one of them is.
        """
        if self.captions is None:
            return self.of_images
        different, query_T = self.captions.unique(return_inverse=True)
        last = torch.full((len(different),), int(self.of_images.max()))
        return last.scatter_reduce(0, query_T, self.of_images, "amin")


def retrieval(
    clip: Clip,
    source: Source,
    job: Job,
    rounds: Rounds,
    show: Callable[[Pairs, Source], None] | None = None,
) -> Retrieval:
    """Collective: measures how well images find their captions among all captions, and captions their images.

    `show`, given on all ranks or none, gets all features on rank 0, before they are ranked, and the samples
    that they are of. Raises as the rounds do: Preempted and EvaluationFailed, on all ranks.
    """
    comm, skipped = rounds.comm, Skipped(max_share=1)
    with evaluating(clip.model):
        parts = list(_parts(clip, source, job, rounds, skipped))
        bad = rounds.bad_of_all(skipped, job.data.max_bad_share)
        pairs, digest_T, numbers = rounds.alone(lambda: _joined(parts))
        if show is not None:
            shown = partial(show, pairs, Subset(source, numbers) if bad else source)
            rounds.alone(shown if comm.world.rank == 0 else lambda: None)
        texts_ahead, images_ahead = _ranked(pairs, rounds)
    of_texts, of_images = (1 + comm.all_reduce(ahead_of).cpu() for ahead_of in (texts_ahead, images_ahead))
    return Retrieval(of_texts, of_images, digest_T.cpu(), bad)


def _ranked(pairs: Pairs, rounds: Rounds) -> tuple[Tensor, Tensor]:
    """Collective: returns what `ahead` counts in the blocks of images that this rank ranks.

    In the last round one may begin after the last image.
    """
    images, world = len(pairs.images_ND), rounds.comm.world
    progress = Progress("retrieval", images, "images ranked")
    begins = range(world.rank * ROWS, images + world.rank * ROWS, world.size * ROWS)
    counts = pairs.image_of_T, pairs.image_of_T  # the first round replaces them, or fails
    for own in rounds.each(ahead(pairs, begins), None, progress, ROWS):
        counts = own or counts
    return counts


def median(ranks: Tensor) -> float:
    """Returns the middle rank, or the mean of the two in the middle."""
    ordered = ranks.sort().values
    return (int(ordered[(len(ordered) - 1) // 2]) + int(ordered[len(ordered) // 2])) / 2


class _Features(NamedTuple):
    """Features of one block, or of one block of each rank; D is 0 on a rank that has none."""

    images: Tensor
    """Image features, float32 [images, D], exact."""
    texts: Tensor
    """Text features, float32 [texts, D], exact."""
    about: Tensor
    """Number of each text's image in the set and digest of its caption, int64 [texts, 2]."""
    numbers: Tensor
    """Number of each image in the set, int64 [images, 1]."""


def _joined(parts: list[_Features]) -> tuple[Pairs, Tensor, list[int]]:
    """Returns the features of all parts, which it empties, the captions' digests and the images' numbers."""
    images_ND = torch.cat([features.images for features in parts])
    about = torch.cat([features.about for features in parts])
    number_N = torch.cat([features.numbers for features in parts])[:, 0].contiguous()
    texts = [features.texts for features in parts]
    parts.clear()
    texts_TD = _same_for_same_captions(torch.cat(texts), about[:, 1])
    image_of_T = torch.searchsorted(number_N, about[:, 0].contiguous())  # numbers have gaps at bad samples
    return Pairs(images_ND, texts_TD, image_of_T), about[:, 1].contiguous(), number_N.tolist()


def _parts(
    clip: Clip,
    source: Source,
    job: Job,
    rounds: Rounds,
    skipped: Skipped,
) -> Iterator[_Features]:
    """Collective: yields the features of one block of each rank, round by round, where a sample is usable."""
    comm, nothing = rounds.comm, _nothing(rounds.comm.device)
    blocks = captioned_blocks(clip, source, job, comm.world.rank, comm.world.size)
    progress = Progress("retrieval", len(source), "images encoded")
    results = (
        _features(clip, block, job, comm.device) if block.valid else nothing
        for block in rounds.counted(blocks, skipped)
    )
    for mine in rounds.each(results, nothing, progress, job.eval.batch_size):
        every = _Features(*(gather_rows(comm, rows) for rows in mine))
        if len(every.images):
            yield every


def _features(clip: Clip, block: RetrievalBlock, job: Job, device: torch.device) -> _Features:
    images, texts = block_features(clip, block, job, device)
    about = torch.stack([block.image_of_caption, block.digests], dim=1)
    numbers = torch.tensor(block.numbers, device=device)[:, None]
    return _Features(exact(images), exact(texts), about.to(device), numbers)


def _nothing(device: torch.device) -> _Features:
    rows = torch.empty(0, 0, device=device)
    return _Features(rows, rows, rows.long(), rows.long())


def gather_rows(comm: Comm, rows: Tensor) -> Tensor:
    """Collective: gathers rows, rank after rank: [n, D] -> [sum of n, D].

    n may differ between ranks, and D may be 0 if n is.
    """
    shapes = comm.all_gather(torch.tensor([rows.shape], device=rows.device))
    most, width = shapes.amax(0).tolist()
    if most == 0:
        return rows
    filled = rows.new_zeros(most, width)
    filled[: rows.shape[0], : rows.shape[1]] = rows
    parts = comm.all_gather(filled).split(most)
    return torch.cat([part[:count] for part, count in zip(parts, shapes[:, 0].tolist(), strict=True)])


def _same_for_same_captions(texts_TD: Tensor, digest_T: Tensor) -> Tensor:
    """Gives equal captions the features of the first of them, in place.

    A model's kernels may differ by a bit between two of them.
    """
    _, group_T = digest_T.unique(return_inverse=True)
    numbers_T = torch.arange(len(digest_T), device=digest_T.device)
    first = torch.full_like(numbers_T, len(digest_T)).scatter_reduce(0, group_T, numbers_T, "amin")[group_T]
    later = (first != numbers_T).nonzero()[:, 0]
    for some in later.split(8192):  # a copy of all would be as large as the texts
        texts_TD[some] = texts_TD[first[some]]
    return texts_TD
