"""Runs everything that a job's `[eval]` asks of a model: zero-shot classification, retrieval, its board.

The board has a few images, each with the texts that the model finds nearest.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.results import EMA, MIX
from trainer.data.bad_samples import Allowed, name_left_out, without
from trainer.data.pictures import AS_SHOWN, Decoding, decode
from trainer.data.source import Source, open_images, open_labelled
from trainer.errors import InputError
from trainer.evaluate.inputs import class_names, templates
from trainer.evaluate.ranking import Pairs
from trainer.evaluate.retrieval import RECALLS, retrieval
from trainer.evaluate.rounds import Rounds, never
from trainer.evaluate.zero_shot import zero_shot
from trainer.model.build import Clip
from trainer.report.board import BoardRow, Text, row, write_board
from trainer.text.wording import many

log = logging.getLogger("clipship")

Metrics = dict[str, float | int]
_LABELS = {"": "", EMA: " (EMA)", MIX: " (mixture)"}
"""Ends of log lines by the begin of the metrics' names."""


class Evaluation:
    """Evaluates a model, any number of times.

    The data sets are opened when it is made, so that bad ones are found before a run and not at its end.
    """

    def __init__(self, job: Job, comm: Comm, run_folder: Path | None = None) -> None:
        """Raises InputError for data that is missing or unreadable.

        The retrieval board is written into `run_folder`, if one is given.
        """
        self._job, self._comm, self._run_folder = job, comm, run_folder
        settings = job.eval
        self._labelled = (
            open_labelled(
                settings,
                job.data.image_key,
                most_bytes=job.data.max_member_bytes,
                allowed=Allowed.by(job.data),
            )
            if settings.zero_shot
            else None
        )
        self._class_names = class_names(settings) if settings.zero_shot else ()
        self._templates = templates(settings) if settings.zero_shot else ()
        self._captioned = open_images(job.retrieval_data) if settings.retrieval else None

    def contents(self) -> dict[str, tuple[str, ...]]:
        """Returns what the keys that may name a file have given, by key."""
        return {"eval.class_names": self._class_names, "eval.templates": self._templates}

    def say_left_out(self) -> None:
        """Logs how many samples are not used, as known before any is read, and names them on rank 0."""
        for source in filter(None, (self._labelled, self._captioned)):
            for cause, count in source.left_out.by_cause.items():
                log.info("%-12s %s not used: %s", "evaluation", many(count, "sample"), cause)
            if self._comm.world.rank == 0:
                name_left_out(source.left_out)

    def __call__(self, clip: Clip, stop: Callable[[], bool] = never, of: str = "") -> Metrics:
        """Collective: returns the metrics under the names of result.json; empty if the job asks for none.

        Raises Preempted on all ranks if `stop` is true on any; it is called before each round of blocks; and
        EvaluationFailed on all ranks if any cannot go on.
        `of` says that the model has other weights than the trained ones, their moving average or a mixture:
        names begin with it, log lines tell, and the retrieval board stays that of the trained weights.
        """
        label, show = _LABELS[of], None if of else self._show
        rounds = Rounds(self._comm, stop)
        metrics = {**self._zero_shot(clip, rounds, label), **self._retrieval(clip, rounds, show, label)}
        return {f"{of}{name}": value for name, value in metrics.items()}

    def _zero_shot(self, clip: Clip, rounds: Rounds, label: str) -> Metrics:
        if self._labelled is None:
            return {}
        result = zero_shot(clip, self._labelled, self._class_names, self._templates, self._job, rounds)
        shares = f"top-1 {result.top1 / result.samples:.2%}, top-5 {result.top5 / result.samples:.2%}"
        log.info("%-12s %s of %d images%s%s", "zero-shot", shares, result.samples, without(result.bad), label)
        return result.metrics()

    def _show(self, pairs: Pairs, source: Source) -> None:
        if self._run_folder is None:
            return
        try:
            rows = board(pairs, source, decoding=Decoding.by(self._job.data))
            write_board(self._run_folder, rows)
        except (OSError, InputError) as error:  # neither a full disk nor lost data end a run
            log.warning("%-12s the retrieval board is NOT WRITTEN: %s", "evaluation", error)

    def _retrieval(
        self, clip: Clip, rounds: Rounds, show: Callable[[Pairs, Source], None] | None, label: str
    ) -> Metrics:
        if self._captioned is None:
            return {}
        result = retrieval(clip, self._captioned, self._job, rounds, show)
        metrics, others = result.metrics(), without(result.bad)
        for way, name in (("image to text", "i2t"), ("text to image", "t2i")):
            recalls = ", ".join(f"R@{k} {metrics[f'retrieval_{name}_r{k}']:.2%}" for k in RECALLS)
            median = metrics[f"retrieval_{name}_median_rank"]
            log.info("%-12s %s: %s, median rank %g%s%s", "retrieval", way, recalls, median, others, label)
        return metrics


IMAGES = 12
TEXTS = 5


def board(
    pairs: Pairs,
    source: Source,
    images: int = IMAGES,
    texts: int = TEXTS,
    decoding: Decoding = AS_SHOWN,
) -> list[BoardRow]:
    """Returns images spread evenly over the set with their nearest different texts, nearest first.

    Not collective.
    """
    chosen = torch.linspace(0, len(source) - 1, min(images, len(source))).long()
    scores_BT = pairs.images_ND[chosen] @ pairs.texts_TD.T
    return [
        _row(number, scores, pairs, source, texts, decoding)
        for number, scores in zip(chosen.tolist(), scores_BT, strict=True)
    ]


def _row(
    number: int, scores_T: torch.Tensor, pairs: Pairs, source: Source, texts: int, decoding: Decoding
) -> BoardRow:
    nearest: dict[str, Text] = {}
    for text in scores_T.argsort(descending=True, stable=True).tolist():
        of_image = int(pairs.image_of_T[text])
        first = int(torch.searchsorted(pairs.image_of_T, of_image))  # the texts of one image are consecutive
        caption = source.read(of_image).captions[text - first]
        own = caption in source.read(number).captions
        nearest.setdefault(caption, Text(caption, float(scores_T[text]), own))
        if len(nearest) == texts:
            break
    sample = source.read(number)
    own_T = (pairs.image_of_T == number).nonzero().flatten()
    if not len(own_T):
        return row(decode(sample, decoding), list(nearest.values()))
    best = int(scores_T[own_T].argmax())
    place = 1 + int((scores_T > scores_T[own_T[best]]).sum())
    return row(decode(sample, decoding), list(nearest.values()), sample.captions[best], place)
