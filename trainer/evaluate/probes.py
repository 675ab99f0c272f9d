"""Classification by the features of a labelled training set: its nearest neighbours, and a linear probe.

kNN is DINO's (arXiv 2104.14294): the 20 nearest by cosine vote, each by exp(cosine / 0.07). The linear probe
is CLIP's (arXiv 2103.00020, A.3): logistic regression by L-BFGS, whose weight decay is found by a search on a
fifth of the training set that is held out. Features are unit vectors of fixed blocks, and cosines are exact.
Shape suffixes: N training samples, R rows of a block of test samples, C classes, D features.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.config import Job
from trainer.data.bad_samples import Skipped, without
from trainer.data.eval_blocks import EvalBlock
from trainer.data.source import Source
from trainer.evaluate.features import evaluating, finite, image_features, labelled_blocks
from trainer.evaluate.ranking import ROWS, exact
from trainer.evaluate.retrieval import gather_rows
from trainer.evaluate.rounds import Progress, Rounds
from trainer.model.build import Clip
from trainer.text.wording import many

log = logging.getLogger("clipship")

NEIGHBOURS = 20
TEMPERATURE = 0.07
COLUMNS = 2**16
"""Training samples whose cosines are computed at once."""
EXPONENTS = (-8.0, -6.0, -4.0, -2.0, 0.0, 2.0)
"""Powers of ten that the search for the weight decay begins with."""
FINEST = 1 / 8
"""Last step of the search: eight to a decade."""
HELD_OUT = 5
"""Every fifth training sample is held out while the weight decay is searched for."""
MOST_ITERATIONS = 1000


class Labelled(NamedTuple):
    """Features of a labelled set, in the order of its samples, the same on all ranks."""

    features: Tensor
    """Unit vectors, float32 [samples, D], as `exact` returns them."""
    labels: Tensor
    """Class numbers, int64 [samples]."""
    bad: Mapping[str, int]
    """Number of further samples that cannot be used, by cause."""


class Probed(NamedTuple):
    """Counts over a test set."""

    by_class: Tensor
    """Samples of each class, and those of them that are right: int64 [2, classes] on the CPU."""

    @property
    def top1(self) -> float:
        return int(self.by_class[1].sum()) / int(self.by_class[0].sum())

    @property
    def mean_per_class_recall(self) -> float:
        """The mean of the classes' own accuracies; a class without samples does not count."""
        own, right = self.by_class[:, self.by_class[0] > 0].double()
        return float((right / own).mean())


Probe = Callable[[Labelled, Labelled, Rounds], Probed]
"""Collective function from a training set and a test set."""


def probed(
    clip: Clip, train: Source, test: Source, job: Job, rounds: Rounds, probe: str
) -> tuple[Probed, Mapping[str, int]]:
    """Collective: returns what a probe of PROBES finds, and the number of bad test samples by cause.

    Raises as the rounds do: Preempted and EvaluationFailed, on all ranks.
    """
    with evaluating(clip.model):
        learned, judged = (_labelled(clip, source, job, rounds, probe) for source in (train, test))
        images = f"{many(len(learned.labels), 'image')}{without(learned.bad)}"
        log.info("%-12s learns from %s", probe, images)
        return PROBES[probe](learned, judged, rounds), judged.bad


def _labelled(clip: Clip, source: Source, job: Job, rounds: Rounds, probe: str) -> Labelled:
    comm, skipped = rounds.comm, Skipped(max_share=1)
    progress = Progress(probe, len(source), "images encoded")
    blocks = labelled_blocks(clip, source, job, comm)
    nothing = torch.empty(0, 0, device=comm.device), torch.empty(0, 0, device=comm.device).long()
    results = (
        _features(clip, each, job, comm.device) if each.valid else nothing
        for each in rounds.counted(blocks, skipped)
    )
    parts = [
        (gather_rows(comm, features), gather_rows(comm, labels))
        for features, labels in rounds.each(results, nothing, progress, job.eval.batch_size)
    ]
    bad = rounds.bad_of_all(skipped, job.data.max_bad_share)
    used = [part for part in parts if len(part[0])]
    return Labelled(torch.cat([f for f, _ in used]), torch.cat([own for _, own in used])[:, 0], bad)


def _features(clip: Clip, block: EvalBlock, job: Job, device: torch.device) -> tuple[Tensor, Tensor]:
    images = finite(image_features(clip, block.images, job.model.precision, device)[: block.valid])
    return exact(images), block.labels[: block.valid, None].to(device)


def knn(train: Labelled, test: Labelled, rounds: Rounds) -> Probed:
    """Collective: lets the nearest training samples of each test sample vote; each rank does its blocks."""
    world, classes = rounds.comm.world, _classes(train, test)
    by_class = torch.zeros(2, classes, dtype=torch.int64, device=test.labels.device)
    begins = range(world.rank * ROWS, len(test.labels) + world.rank * ROWS, world.size * ROWS)
    results = rounds.until_failed(_counts(votes, test, begin) for begin, votes in _votes(train, test, begins))
    for _ in rounds.of(len(test.labels), ROWS):
        by_class += next(results, torch.zeros_like(by_class))
    return Probed(rounds.comm.all_reduce(by_class).cpu())


def _votes(train: Labelled, test: Labelled, begins: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yields where a block of test samples begins, and its votes, float64 [R, C]."""
    classes = _classes(train, test)
    for begin in begins:
        rows_RD = test.features[begin : begin + ROWS].double()
        nearest, labels = neighbours(rows_RD, train)
        votes_RC = torch.zeros(len(rows_RD), classes, dtype=torch.float64, device=rows_RD.device)
        for place in range(nearest.shape[1]):  # one after the other, so that sums have one order
            weights = (nearest[:, place, None] / TEMPERATURE).exp()
            votes_RC.scatter_add_(1, labels[:, place, None], weights)
        yield begin, votes_RC


def neighbours(rows_RD: Tensor, train: Labelled) -> tuple[Tensor, Tensor]:
    """Returns the cosines of the nearest training samples, float64 [R, k], and their labels, int64 [R, k]."""
    nearest = rows_RD.new_empty(len(rows_RD), 0)
    labels = train.labels.new_empty(len(rows_RD), 0)
    for begin in range(0, len(train.labels), COLUMNS):
        part = slice(begin, begin + COLUMNS)
        cosines = torch.cat([nearest, rows_RD @ train.features[part].double().T], dim=1)
        own = torch.cat([labels, train.labels[part].expand(len(rows_RD), -1)], dim=1)
        top = cosines.topk(min(NEIGHBOURS, cosines.shape[1]), dim=1)
        nearest, labels = top.values, own.gather(1, top.indices)
    return nearest, labels


def _counts(scores_RC: Tensor, test: Labelled, begin: int) -> Tensor:
    """Returns `Probed.by_class` of the test samples from `begin` on whose classes have these scores."""
    labels = test.labels[begin : begin + len(scores_RC)]
    right = labels[scores_RC.argmax(1) == labels]
    return torch.stack([own.bincount(minlength=scores_RC.shape[1]) for own in (labels, right)])


def linear(train: Labelled, test: Labelled, rounds: Rounds) -> Probed:
    """Collective: fits a linear classifier to the training set; ranks share the search for its decay."""
    classes = _classes(train, test)
    held_out = torch.arange(len(train.labels), device=train.labels.device) % HELD_OUT == HELD_OUT - 1
    fitted, judged = (
        Labelled(train.features[mask], train.labels[mask], {}) for mask in (~held_out, held_out)
    )
    exponent = _searched(lambda each: _right(fit(fitted, classes, 10**each), judged), rounds)
    log.info("%-12s weight decay 10^%g", "linear", exponent)

    def counts() -> Tensor:
        if rounds.comm.world.rank:
            return torch.zeros(2, classes, dtype=torch.int64, device=test.labels.device)
        return _counts(_logits(fit(train, classes, 10**exponent), test), test, 0)

    return Probed(rounds.comm.all_reduce(rounds.alone(counts)).cpu())


def _searched(right: Callable[[float], int], rounds: Rounds) -> float:
    """Collective: returns the exponent with which most held-out samples are right; of equal ones the largest.

    It is the paper's search: coarse steps first, then ever smaller ones around the best.
    """
    comm, found = rounds.comm, dict[float, int]()
    wanted, step = list(EXPONENTS), EXPONENTS[1] - EXPONENTS[0]
    while True:
        mine = wanted[comm.world.rank :: comm.world.size]
        own = rounds.alone(lambda mine=mine: {each: right(each) for each in mine})  # type: ignore[misc]
        counts = torch.tensor([own.get(each, 0) for each in wanted], device=comm.device)
        found.update(zip(wanted, comm.all_reduce(counts).tolist(), strict=True))
        best = max(found, key=lambda each: (found[each], each))
        step /= 2
        if step < FINEST:
            return best
        wanted = [best - step, best + step]


def fit(train: Labelled, classes: int, decay: float) -> Tensor:
    """Returns weights and, last, the bias of each class: float64 [C, D + 1].

    They minimise the mean cross-entropy plus decay / 2 times the sum of the squared weights, which is
    scikit-learn's objective with C = 1 / (decay * samples).
    """
    features_ND, labels = train.features.double(), train.labels
    layer = features_ND.new_zeros(classes, features_ND.shape[1] + 1).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [layer],
        max_iter=MOST_ITERATIONS,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits_NC = torch.nn.functional.linear(features_ND, layer[:, :-1], layer[:, -1])
        penalty = decay / 2 * layer[:, :-1].square().sum()
        total = torch.nn.functional.cross_entropy(logits_NC, labels) + penalty
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    return layer.detach()


def _logits(layer: Tensor, test: Labelled) -> Tensor:
    return torch.nn.functional.linear(test.features.double(), layer[:, :-1], layer[:, -1])


def _right(layer: Tensor, test: Labelled) -> int:
    return int((_logits(layer, test).argmax(1) == test.labels).sum())


def _classes(train: Labelled, test: Labelled) -> int:
    return 1 + int(torch.cat([train.labels, test.labels]).max())


PROBES: Mapping[str, Probe] = {"knn": knn, "linear": linear}
"""Collective functions by the names that suites have for them."""
