"""Measures a model on the data sets of a suite, one after the other, on all ranks."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.comm.protocol import Comm
from trainer.config import Data, Job
from trainer.data.source import Source, open_images, open_labelled
from trainer.errors import InputError, Preempted
from trainer.evaluate.retrieval import RECALLS, retrieval
from trainer.evaluate.rounds import Rounds, never
from trainer.evaluate.suite_folders import CLASS_NAMES, SuiteSet, find_sets
from trainer.evaluate.suite_table import METRICS
from trainer.evaluate.text_cache import kept_class_features
from trainer.evaluate.zero_shot import LabelKeys, classify
from trainer.model.build import Clip

log = logging.getLogger("clipship")

Result = dict[str, Any]
"""Result of one set: name, title, task, metric, its title, value, samples, seconds and all metrics; or name,
title and `error`, if the set, or a sample of it, cannot be read."""
_TOP5_FROM = 5
"""Fewest classes for which the top-5 accuracy says anything."""


def measure_suite(
    clip: Clip, job: Job, comm: Comm, kept: Path | None = None, stop: Callable[[], bool] = never
) -> list[Result]:
    """Collective: returns the result of each set of `[eval.suite]` that is on disk.

    `kept` is the folder for text features, which need no second computation. A set with a sample that cannot
    be read is not measured. Raises Preempted on all ranks if `stop` is true on any.
    """
    return [_result(clip, each, job, comm, kept, stop) for each in find_sets(job.eval).sets]


def _result(
    clip: Clip, each: SuiteSet, job: Job, comm: Comm, kept: Path | None, stop: Callable[[], bool]
) -> Result:
    comm.heartbeat.begin_phase("evaluation")  # its time limit is that of one set
    start = time.monotonic()
    about = {"name": each.row.name, "title": each.row.title}
    source, error = _opened(each, job, comm)
    metrics: dict[str, float] = {}
    if source is not None:
        metrics, error = _measured(clip, each, source, job, Rounds(comm, stop, unreadable=[]), kept)
    if source is None or error:
        log.warning("%-12s %s is NOT MEASURED: %s", "suite", each.row.name, error)
        return {**about, "error": error}
    value, metric = metrics[each.row.metric], METRICS[each.row.metric]
    log.info(
        "%-12s %s: %s %.2f%% of %d images", "suite", each.row.name, metric.title, 100 * value, len(source)
    )
    return {
        **about,
        "task": "retrieval" if metric.retrieval else "classification",
        "metric": each.row.metric,
        "metric_title": metric.title,
        "value": value,
        "samples": len(source),
        "seconds": round(time.monotonic() - start, 1),
        "metrics": metrics,
    }


def _opened(each: SuiteSet, job: Job, comm: Comm) -> tuple[Source | None, str]:
    """Collective: returns the samples of a set; None with the reason if any rank cannot open them."""
    source, own = None, ""
    try:
        source = _open(each, job)
    except InputError as problem:
        own = str(problem)
    error = _of_any(own, comm)
    return (None, error) if error else (source, "")


def _measured(
    clip: Clip, each: SuiteSet, source: Source, job: Job, rounds: Rounds, kept: Path | None
) -> tuple[dict[str, float], str]:
    """Collective: returns the metrics of a set; none, and the reason, if any rank cannot read a sample."""
    measure = _by_retrieval if each.by_retrieval else _by_classification
    try:
        metrics = measure(clip, each, source, job, rounds, kept)
    except Preempted:
        if error := _of_any("".join(rounds.unreadable or ()), rounds.comm):
            return {}, error
        raise
    return metrics, ""


def _of_any(error: str, comm: Comm) -> str:
    """Collective: returns the error of the first rank that has one; "" if none has."""
    return next((each for each in comm.all_gather_object(error) if each), "")


def _open(each: SuiteSet, job: Job) -> Source:
    if each.by_retrieval:
        limits = job.data.model_dump(include={"max_member_bytes", "max_image_pixels"})
        return open_images(Data(train=each.files, format="webdataset", **limits))
    settings = {"zero_shot": each.files, "class_names": each.class_names, "class_key": "cls"}
    return open_labelled(job.eval.model_copy(update=settings), most_bytes=job.data.max_member_bytes)


def _by_classification(
    clip: Clip, each: SuiteSet, source: Source, job: Job, rounds: Rounds, kept: Path | None
) -> dict[str, float]:
    classes_CD = kept_class_features(clip, each.class_names, each.templates, job, kept, rounds)
    keys = LabelKeys(f"data set {each.row.name}", CLASS_NAMES)
    result = classify(clip, source, classes_CD, job, rounds, keys)
    top5 = {"top5": result.top5 / result.samples} if len(each.class_names) >= _TOP5_FROM else {}
    return {
        "top1": result.top1 / result.samples,
        **top5,
        "mean_per_class_recall": result.mean_per_class_recall(),
        "macro_f1": result.macro_f1(),
    }


def _by_retrieval(
    clip: Clip, _: SuiteSet, source: Source, job: Job, rounds: Rounds, _kept: Path | None
) -> dict[str, float]:
    result = retrieval(clip, source, job, rounds)
    measured, queries = result.metrics(), result.of_queries()
    metrics = {f"{way}_r{k}": measured[f"retrieval_{way}_r{k}"] for way in ("i2t", "t2i") for k in RECALLS}
    metrics |= {f"query_r{k}": int((queries <= k).sum()) / len(queries) for k in RECALLS}
    return {**metrics, "mean_r1": (metrics["i2t_r1"] + metrics["t2i_r1"]) / 2}
