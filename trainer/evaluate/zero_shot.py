"""Zero-shot classification, shared by all ranks.

Samples and classes are cut into fixed blocks, and block b belongs to rank b modulo world_size. A block is
computed the same way on any rank, and only integers and rows that one rank owns are added up: so any number
of ranks gives the same result, to the last digit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from trainer.config import Job, Precision
from trainer.data.bad_samples import Skipped
from trainer.data.eval_blocks import EvalBlock
from trainer.data.source import Source
from trainer.errors import InputError
from trainer.evaluate.features import evaluating, finite, image_features, labelled_blocks, text_features
from trainer.evaluate.rounds import Progress, Rounds
from trainer.model.build import Clip

CLASSES_PER_BLOCK = 16


@dataclass(frozen=True)
class ZeroShot:
    """Counts over the whole set."""

    samples: int
    top1: int
    top5: int
    by_class: Tensor
    """Samples of each class, samples taken for it, and those of them that are right: int64 [3, classes] on
    the CPU."""
    bad: Mapping[str, int] = field(default_factory=dict)
    """Number of further samples that cannot be used, by cause."""

    def metrics(self) -> dict[str, float | int]:
        """Returns the metrics under the names of result.json."""
        return {
            "zero_shot_samples": self.samples,
            **({"zero_shot_bad_samples": sum(self.bad.values())} if self.bad else {}),
            "zero_shot_top1": self.top1 / self.samples,
            "zero_shot_top5": self.top5 / self.samples,
        }

    def mean_per_class_recall(self) -> float:
        """Returns the mean of the classes' own accuracies; a class without samples does not count."""
        own, _, right = self._of_present()
        return float((right / own).mean())

    def macro_f1(self) -> float:
        """Returns the mean of the classes' F1 scores; a class without samples does not count."""
        own, taken, right = self._of_present()
        return float((2 * right / (own + taken)).mean())

    def _of_present(self) -> Tensor:
        """Returns the counts of the classes that have samples: float64 [3, classes]."""
        return self.by_class[:, self.by_class[0] > 0].double()


@dataclass(frozen=True)
class LabelKeys:
    """Names of what gives the samples and the class names, for messages."""

    samples: str = "eval.zero_shot"
    names: str = "eval.class_names"


OF_JOB = LabelKeys()


def zero_shot(
    clip: Clip,
    source: Source,
    names: Sequence[str],
    templates: Sequence[str],
    job: Job,
    rounds: Rounds,
    keys: LabelKeys = OF_JOB,
) -> ZeroShot:
    """Collective: counts how often the right class name is nearest, or among the nearest five.

    Names stand in the sentences of `templates`. Raises as the rounds do: Preempted and EvaluationFailed, on
    all ranks.
    """
    with evaluating(clip.model):
        classes_CD = class_features(clip, names, templates, job.model.precision, rounds)
    return classify(clip, source, classes_CD, job, rounds, keys)


def classify(
    clip: Clip,
    source: Source,
    classes_CD: Tensor,
    job: Job,
    rounds: Rounds,
    keys: LabelKeys = OF_JOB,
) -> ZeroShot:
    """Collective: does as `zero_shot`, with the features that `class_features` returned."""
    comm = rounds.comm
    progress, skipped = Progress("zero-shot", len(source), "images seen"), Skipped(max_share=1)
    counts = torch.zeros(2, dtype=torch.int64, device=comm.device)
    by_class = torch.zeros(3, len(classes_CD), dtype=torch.int64, device=comm.device)
    nothing = torch.zeros_like(counts), torch.zeros_like(by_class)
    with evaluating(clip.model):
        blocks = labelled_blocks(clip, source, job, comm)
        labelled = _labelled(source, rounds.counted(blocks, skipped), len(classes_CD), keys)
        results = (
            _hits(clip, block, classes_CD, job.model.precision) if block.valid else nothing
            for block in labelled
        )
        for hits, of_classes in rounds.each(results, nothing, progress, job.eval.batch_size):
            counts += hits
            by_class += of_classes
    bad = rounds.bad_of_all(skipped, job.data.max_bad_share)
    samples, top5 = comm.all_reduce(counts).tolist()
    by_class = comm.all_reduce(by_class).cpu()
    return ZeroShot(samples, int(by_class[2].sum()), top5, by_class, bad)


def _labelled(
    source: Source, blocks: Iterable[EvalBlock], classes: int, keys: LabelKeys
) -> Iterator[EvalBlock]:
    """Yields the blocks. Raises InputError, which names the first sample of a class that has no name."""
    for block in blocks:
        for index in (block.labels >= classes).nonzero()[:1, 0].tolist():
            raw = source.read(block.numbers[index])
            raise InputError(
                f"{keys.samples}: {raw.origin}: sample {raw.key} has class number {raw.label}, "
                f"but {keys.names} gives {classes} names, for the numbers from 0 to {classes - 1}"
            )
        yield block


def _hits(clip: Clip, block: EvalBlock, classes_CD: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Returns samples and hits of the nearest five classes, int64 [2], and `ZeroShot.by_class` of a block."""
    device, classes = classes_CD.device, len(classes_CD)
    labels = block.labels[: block.valid].to(device)
    images_BD = finite(image_features(clip, block.images, precision, device)[: block.valid])
    nearest = (images_BD.to(classes_CD.dtype) @ classes_CD.T).topk(min(5, classes)).indices
    hits = nearest == labels[:, None]
    counts = torch.stack([torch.tensor(block.valid, device=device), hits.any(1).sum()])
    own, taken = labels.bincount(minlength=classes), nearest[:, 0].bincount(minlength=classes)
    return counts, torch.stack([own, taken, labels[hits[:, 0]].bincount(minlength=classes)])


def class_features(
    clip: Clip,
    names: Sequence[str],
    templates: Sequence[str],
    precision: Precision,
    rounds: Rounds,
) -> Tensor:
    """Collective: returns a unit vector for each class, float32 [classes, D].

    It is the mean of its sentences' features (arXiv 2103.00020, 3.1.4).
    """
    comm, mine = rounds.comm, dict[int, Tensor]()
    own = (n for n in range(len(names)) if n // CLASSES_PER_BLOCK % comm.world.size == comm.world.rank)
    results = rounds.until_failed(
        (n, _class_row(clip, [template.format(names[n]) for template in templates], precision, comm.device))
        for n in own
    )
    for _ in rounds.of(len(names), CLASSES_PER_BLOCK):
        mine.update(islice(results, CLASSES_PER_BLOCK))
    width = comm.all_reduce(
        torch.tensor([next(iter(mine.values())).numel() if comm.world.rank == 0 else 0], device=comm.device)
    )
    return comm.all_reduce(rounds.alone(lambda: _filled(len(names), int(width), mine, comm.device)))


def _class_row(clip: Clip, texts: list[str], precision: Precision, device: torch.device) -> Tensor:
    """Returns the unit vector of a class that these sentences name, float32 [D]."""
    sentences = finite(text_features(clip, clip.tokenizer(texts), precision, device))
    return torch.nn.functional.normalize(sentences.float().mean(0), dim=0)


def _filled(classes: int, width: int, rows: Mapping[int, Tensor], device: torch.device) -> Tensor:
    """Returns the rows in their places, and zeros in the others."""
    features_CD = torch.zeros(classes, width, device=device)
    for number, row in rows.items():
        features_CD[number] = row
    return features_CD
