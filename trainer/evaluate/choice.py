"""Choice among captions: of each image's captions the first is right, the others are nearly so.

It is how SugarCrepe is measured (arXiv 2306.14610), and questions with several answers, such as CVQA's.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.config import Job
from trainer.data.bad_samples import Skipped
from trainer.data.retrieval_blocks import RetrievalBlock
from trainer.data.source import Source
from trainer.errors import InputError
from trainer.evaluate.features import block_features, captioned_blocks, evaluating
from trainer.evaluate.ranking import exact
from trainer.evaluate.rounds import Progress, Rounds
from trainer.model.build import Clip


class Choice(NamedTuple):
    """Counts over a set."""

    samples: int
    right: int
    """Images to which their first caption is nearer than every other of theirs."""
    bad: Mapping[str, int]
    """Number of further images that cannot be used, by cause."""


def choice(clip: Clip, source: Source, job: Job, rounds: Rounds) -> Choice:
    """Collective: counts the images whose first caption is nearest among their own.

    Raises as the rounds do: Preempted and EvaluationFailed, on all ranks.
    """
    comm, size, skipped = rounds.comm, job.eval.batch_size, Skipped(max_share=1)
    counts = torch.zeros(2, dtype=torch.int64, device=comm.device)
    progress = Progress("choice", len(source), "images judged")
    blocks = captioned_blocks(clip, source, job, comm.world.rank, comm.world.size)
    with evaluating(clip.model):
        results = rounds.until_failed(
            _counts(clip, each, job, comm.device) for each in rounds.counted(blocks, skipped)
        )
        for begin in rounds.of(len(source), size):
            counts += next(results, torch.zeros_like(counts))
            progress.done(begin + size * comm.world.size)
    bad = rounds.bad_of_all(skipped, job.data.max_bad_share)
    samples, right = comm.all_reduce(counts).tolist()
    return Choice(samples, right, bad)


def _counts(clip: Clip, block: RetrievalBlock, job: Job, device: torch.device) -> Tensor:
    """Returns the number of images and of right choices in a block."""
    if not block.valid:
        return torch.zeros(2, dtype=torch.int64, device=device)
    numbers = torch.tensor(block.numbers)
    place_T = torch.searchsorted(numbers, block.image_of_caption).to(device)
    if lone := [block.keys[place] for place, count in enumerate(place_T.bincount().tolist()) if count == 1]:
        raise InputError(f"sample {lone[0]} has one caption: a choice takes the right one first, then others")
    images_ND, texts_TD = (exact(each).double() for each in block_features(clip, block, job, device))
    right_N = is_first_nearest((images_ND[place_T] * texts_TD).sum(1), place_T)
    return torch.stack([torch.tensor(block.valid, device=device), right_N.sum()])


def is_first_nearest(cosine_T: Tensor, image_of_T: Tensor) -> Tensor:
    """Returns whether each image's first caption is nearer than all others of that image, bool [images].

    Captions come image by image, [captions]; what is equally near is not chosen.
    """
    first_T = torch.ones_like(image_of_T, dtype=torch.bool)
    first_T[1:] = image_of_T[1:] != image_of_T[:-1]
    own_N = cosine_T[first_T]
    others_N = torch.full_like(own_N, -torch.inf)
    others_N.scatter_reduce_(0, image_of_T[~first_T], cosine_T[~first_T], "amax")
    return own_N > others_N
