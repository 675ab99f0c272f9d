"""Measures a model on the data sets of a suite, one after the other, on all ranks."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.comm.protocol import Comm
from trainer.config import Data, Job
from trainer.data.bad_samples import Allowed, Skipped, without
from trainer.data.eval_blocks import RetrievalBlock
from trainer.data.source import Source, open_images, open_labelled
from trainer.errors import InputError
from trainer.evaluate.features import block_features, captioned_blocks, evaluating
from trainer.evaluate.probes import probed
from trainer.evaluate.ranking import exact
from trainer.evaluate.retrieval import RECALLS, retrieval
from trainer.evaluate.rounds import EvaluationFailed, Progress, Rounds, never
from trainer.evaluate.suite_data import CLASS_NAMES, METRICS, PROBES, SuiteSet, find_sets
from trainer.evaluate.zero_shot import LabelKeys, zero_shot
from trainer.model.build import Clip
from trainer.text.wording import many

log = logging.getLogger("clipship")

Result = dict[str, Any]
"""Result of one set: name, title, task, metric, its title, value, samples, seconds and all metrics; or name,
title and `error`, if the set cannot be read or has too many bad samples."""
_TOP5_FROM = 5
"""Fewest classes for which the top-5 accuracy says anything."""


def measure_suite(clip: Clip, job: Job, comm: Comm, stop: Callable[[], bool] = never) -> list[Result]:
    """Collective: returns the result of each set of `[eval.suite]` that is on disk.

    A set that cannot be read, or with more bad samples than `[data]` allows, is not measured. Raises
    Preempted on all ranks if `stop` is true on any.
    """
    return [_result(clip, each, job, comm, stop) for each in find_sets(job.eval).sets]


def _result(clip: Clip, each: SuiteSet, job: Job, comm: Comm, stop: Callable[[], bool]) -> Result:
    comm.heartbeat.begin_phase("evaluation")  # its time limit is that of one set
    start = time.monotonic()
    about = {"name": each.row.name, "title": each.row.title}
    try:
        rounds = Rounds(comm, stop)
        source = rounds.alone(lambda: _open(each, each.files, job))
        metrics, bad = _MEASURES[each.metric.task](clip, each, source, job, rounds)
    except EvaluationFailed as problem:
        log.warning("%-12s %s is NOT MEASURED: %s", "suite", each.row.name, problem)
        return {**about, "error": str(problem)}
    value, metric = metrics[each.row.metric], METRICS[each.row.metric]
    samples = len(source) - sum(bad.values())
    images = f"{many(samples, 'image')}{without(bad)}"
    log.info("%-12s %s: %s %.2f%% of %s", "suite", each.row.name, metric.title, 100 * value, images)
    return {
        **about,
        "task": metric.task,
        "metric": each.row.metric,
        "metric_title": metric.title,
        "value": value,
        "samples": samples,
        **({"bad_samples": bad} if bad else {}),
        "seconds": round(time.monotonic() - start, 1),
        "metrics": metrics,
    }


def _open(each: SuiteSet, files: Sequence[str], job: Job) -> Source:
    if each.metric.captioned:
        limits = {"max_member_bytes", "max_image_pixels", "transparency", "on_bad_sample", "max_bad_share"}
        return open_images(
            Data(train=tuple(files), format="webdataset", **job.data.model_dump(include=limits))
        )
    settings = {"zero_shot": tuple(files), "class_names": each.class_names, "class_key": "cls"}
    labelled, allowed = job.eval.model_copy(update=settings), Allowed.by(job.data)
    return open_labelled(labelled, most_bytes=job.data.max_member_bytes, allowed=allowed)


Measured = tuple[dict[str, float], Mapping[str, int]]
"""Metrics of a set, and the number of samples that they do not count, by cause."""


def _by_classification(clip: Clip, each: SuiteSet, source: Source, job: Job, rounds: Rounds) -> Measured:
    keys = LabelKeys(f"data set {each.row.name}", CLASS_NAMES)
    result = zero_shot(clip, source, each.class_names, each.templates, job, rounds, keys)
    top5 = {"top5": result.top5 / result.samples} if len(each.class_names) >= _TOP5_FROM else {}
    metrics = {
        "top1": result.top1 / result.samples,
        **top5,
        "mean_per_class_recall": result.mean_per_class_recall(),
        "macro_f1": result.macro_f1(),
    }
    return metrics, result.bad


def _by_retrieval(clip: Clip, _: SuiteSet, source: Source, job: Job, rounds: Rounds) -> Measured:
    result = retrieval(clip, source, job, rounds)
    measured, queries = result.metrics(), result.of_queries()
    metrics = {f"{way}_r{k}": measured[f"retrieval_{way}_r{k}"] for way in ("i2t", "t2i") for k in RECALLS}
    metrics |= {f"query_r{k}": int((queries <= k).sum()) / len(queries) for k in RECALLS}
    return {**metrics, "mean_r1": (metrics["i2t_r1"] + metrics["t2i_r1"]) / 2}, result.bad


def _by_probe(clip: Clip, each: SuiteSet, source: Source, job: Job, rounds: Rounds) -> Measured:
    train, probe = rounds.alone(lambda: _open(each, each.train, job)), each.metric.task
    result, bad = probed(clip, train, source, job, rounds, probe)
    metrics = {f"{probe}_top1": result.top1, f"{probe}_mean_per_class_recall": result.mean_per_class_recall}
    return metrics, bad


def _by_choice(clip: Clip, _: SuiteSet, source: Source, job: Job, rounds: Rounds) -> Measured:
    result = choice(clip, source, job, rounds)
    return {"choice_top1": result.right / result.samples}, result.bad


_MEASURES = {
    "classification": _by_classification,
    "retrieval": _by_retrieval,
    "choice": _by_choice,
    **dict.fromkeys(PROBES, _by_probe),
}
"""Collective functions that measure a set, by `Metric.task`."""


class Choice(NamedTuple):
    """Counts over a set."""

    samples: int
    right: int
    """Images to which their first caption is nearer than every other of theirs."""
    bad: Mapping[str, int]
    """Number of further images that cannot be used, by cause."""


def choice(clip: Clip, source: Source, job: Job, rounds: Rounds) -> Choice:
    """Collective: counts the images whose first caption is nearest among their own.

    The first one is right, and the others are nearly so. It is how SugarCrepe is measured (arXiv 2306.14610),
    and questions with several answers, such as CVQA's.
    Raises as the rounds do: Preempted and EvaluationFailed, on all ranks.
    """
    comm, skipped = rounds.comm, Skipped(max_share=1)
    counts, nothing = torch.zeros(2, 2, dtype=torch.int64, device=comm.device)
    progress = Progress("choice", len(source), "images judged")
    blocks = captioned_blocks(clip, source, job, comm.world.rank, comm.world.size)
    with evaluating(clip.model):
        results = (
            _counts(clip, each, job, comm.device) if each.valid else nothing
            for each in rounds.counted(blocks, skipped)
        )
        for own in rounds.each(results, nothing, progress, job.eval.batch_size):
            counts += own
    bad = rounds.bad_of_all(skipped, job.data.max_bad_share)
    samples, right = comm.all_reduce(counts).tolist()
    return Choice(samples, right, bad)


def _counts(clip: Clip, block: RetrievalBlock, job: Job, device: torch.device) -> Tensor:
    """Returns the number of images and of right choices in a block."""
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
