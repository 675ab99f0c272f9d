"""The public data sets of `clipship eval --suite`: their table, where they lie on disk, and their results.

`suites.toml` is the table. On disk they are laid out as CLIP_benchmark and DataComp do:
FOLDER/test/*.tar with samples of an image and its class number (.cls) or captions (.txt); test/nshards.txt
counts the shards; classnames.txt and zeroshot_classification_templates.txt, with {c} for the class name, make
the sentences; dataset_type.txt says "retrieval" or "choice". The level `test` may be left out, and a folder
of images for each class may take the place of shards. Opens no shard; imports no torch.
"""

import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from trainer.config import Eval, Job
from trainer.data.image_folder import class_folders, image_folder
from trainer.data.shard_names import natural_order
from trainer.errors import InputError
from trainer.evaluate.inputs import class_names, lines, templates
from trainer.run.checkpoints import EMA_WEIGHTS, run_of_weights
from trainer.run.layout import EVALUATIONS
from trainer.safe_io.atomic import write_json
from trainer.sysinfo.own_table import own_table
from trainer.text.masking import masked_values
from trainer.text.near import near
from trainer.text.table import aligned
from trainer.text.terminal import one_line, say, shown
from trainer.text.wording import many

OWN = "own"
"""Name of the suite that the folders of `eval.suite.folders` are."""
_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class Metric:
    """A metric of a data set."""

    title: str
    task: str = "classification"
    """Name of how it is measured, for records: a key of `trainer.evaluate.suite._MEASURES`."""

    @property
    def captioned(self) -> bool:
        """True if samples have captions and no classes."""
        return self.task in ("retrieval", "choice")

    @property
    def probe(self) -> bool:
        """True if a labelled training set is learned from."""
        return self.task in ("knn", "linear")


METRICS: Mapping[str, Metric] = {
    "top1": Metric("top-1 accuracy"),
    "mean_per_class_recall": Metric("mean per-class recall"),
    "macro_f1": Metric("macro F1"),
    "mean_r1": Metric("mean R@1", "retrieval"),
    "query_r1": Metric("text to image R@1", "retrieval"),
    "choice_top1": Metric("right caption chosen", "choice"),
    "knn_top1": Metric("kNN top-1 accuracy", "knn"),
    "linear_top1": Metric("linear probe accuracy", "linear"),
}
"""Metrics that a set may be reported by. macro_f1 and mean_per_class_recall are means over the classes that
have samples; mean_r1 is the mean of both directions; query_r1 is a share of different texts, each found if
one of its pictures is nearest."""
PROBES: Mapping[str, str] = {metric.task: name for name, metric in METRICS.items() if metric.probe}
"""Metrics of probes by what stands before the colon of a name: "knn:vtab/pets", "linear:own"."""


@dataclass(frozen=True)
class SetRow:
    """One public data set."""

    name: str
    title: str
    metric: str
    source: str
    """Place where the files come from: an address, or words."""

    @property
    def folder(self) -> str:
        """Name of its folder below `eval.suite.root`; `_test` may follow."""
        return f"wds_{split_name(self.name)[1].replace('/', '-')}"


@dataclass(frozen=True)
class SuiteTable:
    """All data sets and suites."""

    sets: Mapping[str, SetRow]
    suites: Mapping[str, Sequence[str]]
    """Names of each suite's sets."""
    unsupported: Mapping[str, Mapping[str, str]]
    """By suite: the sets that are not measured, each with the reason."""


@cache
def table() -> SuiteTable:
    """Returns the table of the package."""
    content = own_table(__file__, "suites.toml")
    sets = {name: SetRow(name, **row) for name, row in content["sets"].items()}
    return SuiteTable(sets, content["suites"], content["unsupported"])


def split_name(name: str) -> tuple[str, str]:
    """Returns the probe that a name of a suite or a set asks for, "" for none, and the name without it."""
    probe, colon, rest = name.partition(":")
    return (probe, rest) if colon and probe in PROBES else ("", name)


def rows_of(names: Sequence[str]) -> list[SetRow]:
    """Returns the sets that suites and sets by these names have, each once.

    The suite of own folders has none here, and a probe leaves out a suite's sets for retrieval. Raises
    InputError for unknown names, with the nearest known one.
    """
    if unknown := [name for name in names if split_name(name)[1] not in known_names()]:
        raise InputError("\n".join(map(_unknown, unknown)))
    chosen: dict[SetRow, None] = {}
    for probe, base in map(split_name, names):
        rows = [table().sets[each] for each in table().suites.get(base, (base,)) if each != OWN]
        usable = [row for row in rows if not (probe and METRICS[row.metric].captioned)]
        if rows and not usable:
            raise InputError(f'eval.suite.names: "{probe}:{base}": its samples have captions and no classes')
        chosen |= dict.fromkeys(_by(probe, row) for row in usable)
    return list(chosen)


def _by(probe: str, row: SetRow) -> SetRow:
    return replace(row, name=f"{probe}:{row.name}", metric=PROBES[probe]) if probe else row


def unsupported(names: Sequence[str]) -> Mapping[str, str]:
    """Returns the sets of these suites that are not measured, with the reasons."""
    bases = (split_name(name)[1] for name in names)
    return {each: why for name in bases for each, why in table().unsupported.get(name, {}).items()}


def known_names() -> tuple[str, ...]:
    """Returns the names of all suites, then those of all sets."""
    return (*table().suites, OWN, *table().sets)


def _unknown(name: str) -> str:
    nearest = near(name[:_LONGEST_SHOWN], known_names(), most=1)
    suites = ", ".join((*table().suites, OWN))
    hint = f"did you mean {nearest[0]}?" if nearest else f"the suites are {suites}"
    reasons = {each: why for some in table().unsupported.values() for each, why in some.items()}
    if name in reasons:
        hint = f"it is not measured, because {reasons[name]}"
    shown = one_line(name[:_LONGEST_SHOWN])
    return f'eval.suite.names: there is no suite and no data set called "{shown}"; {hint}'


SPLIT, TRAIN = "test", "train"
SHARD_COUNT = "nshards.txt"
CLASS_NAMES = "classnames.txt"
TEMPLATES = "zeroshot_classification_templates.txt"
TYPE = "dataset_type.txt"
_TYPES = {"": "top1", "classification": "top1", "retrieval": "mean_r1", "choice": "choice_top1"}


@dataclass(frozen=True)
class SuiteSet:
    """A data set that is on disk and whole, as far as its names tell."""

    row: SetRow
    files: tuple[str, ...]
    """Shards, or one folder of class folders."""
    class_names: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    """Shards or folder of the training set that a probe learns from."""

    @property
    def metric(self) -> Metric:
        return METRICS[self.row.metric]


@dataclass(frozen=True)
class Missing:
    """A data set that is not measured."""

    row: SetRow
    why: str
    there: bool
    """True if its folder is there, but not whole."""


@dataclass(frozen=True)
class Suites:
    """Data sets that the job's `[eval.suite]` asks for."""

    sets: tuple[SuiteSet, ...]
    missing: tuple[Missing, ...]


def find_sets(evaluation: Eval) -> Suites:
    """Returns the sets on disk and those that are not, in the order of the suites.

    Raises InputError for unknown names, and for sets without the key that says where they are.
    """
    sets: list[SuiteSet] = []
    missing: list[Missing] = []
    for row, folders in [*_public(evaluation), *_own(evaluation)]:
        try:
            sets.append(_set(row, folders, evaluation))
        except InputError as problem:
            missing.append(Missing(row, str(problem), any(map(os.path.isdir, folders))))
    return Suites(tuple(sets), tuple(missing))


def check_suite(evaluation: Eval) -> None:
    """Raises InputError if `[eval.suite]` names unknown sets, or leaves out where they are.

    Sets that are not on disk are fine: a run does not need them.
    """
    if evaluation.suite.names:
        find_sets(evaluation)


def check_suite_files(evaluation: Eval) -> None:
    """Raises InputError if no set of the suite is on disk; it names where each comes from."""
    if evaluation.suite.names and not (suites := find_sets(evaluation)).sets:
        names = ", ".join(evaluation.suite.names)
        raise InputError(
            f"eval.suite: nothing of {names} is on disk, and nothing is downloaded:\n"
            + "\n".join(explained(suites.missing))
            + f"\n{LAYOUT}"
        )


LAYOUT = (
    f"A data set is a folder with {SPLIT}/*.tar, {CLASS_NAMES} and {TEMPLATES}; for retrieval and "
    f"choice with {SPLIT}/*.tar alone, whose samples have their captions in .txt, one a line"
)


def explained(missing: Sequence[Missing]) -> Iterator[str]:
    """Yields a line for each missing set: why it is not measured, and where its files come from."""
    for each in missing:
        source = f"; from: {each.row.source}" if each.row.source else ""
        yield f"{each.row.name}: {each.why}{source}"


def unsupported_sets(evaluation: Eval) -> dict[str, str]:
    """Returns the sets of the suites that Clipship does not measure, with the reasons."""
    return dict(unsupported(evaluation.suite.names))


def _public(evaluation: Eval) -> Iterator[tuple[SetRow, list[Path]]]:
    """Yields the public sets, each with the folders where it may be."""
    suite = evaluation.suite
    rows = rows_of(suite.names)
    if rows and suite.root is None:
        raise InputError(
            f"eval.suite.root: give the folder that holds the data sets of {', '.join(suite.names)}, for "
            f"example {rows[0].folder}_{SPLIT}"
        )
    for row in rows:
        root = Path(suite.root or "")
        yield row, [root / f"{row.folder}_{SPLIT}", root / row.folder]


def _own(evaluation: Eval) -> Iterator[tuple[SetRow, list[Path]]]:
    """Yields the sets of `eval.suite.folders`, which are named as their folders are."""
    suite = evaluation.suite
    names = [name for name in suite.names if split_name(name)[1] == OWN]
    if not names:
        return
    if not suite.folders:
        raise InputError(f'eval.suite.folders: the suite "{OWN}" has no folder; name at least one')
    folders = [Path(folder) for folder in suite.folders]
    counts = Counter(folder.name for folder in folders)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise InputError(
            f"eval.suite.folders: two folders are called {twice[0]}; results need different names"
        )
    for name, folder in product(names, folders):
        metric = PROBES.get(split_name(name)[0], "")
        yield SetRow(f"{name}/{folder.name}", folder.name, metric, ""), [folder]


def _set(row: SetRow, folders: Sequence[Path], evaluation: Eval) -> SuiteSet:
    """Returns the set in the first folder that is there. Raises InputError that says what is missing."""
    folder = next(filter(os.path.isdir, folders), None)  # a name may be too long for every file system
    if folder is None:
        raise InputError(f"there is no folder {folders[0]}")
    row = SetRow(row.name, row.title, row.metric or _metric(folder), row.source)
    files = _files(folder)
    if METRICS[row.metric].captioned:
        if image_folder(files):
            raise InputError(f"{folder} holds no shards (*.tar), which {METRICS[row.metric].task} needs")
        return SuiteSet(row, files)
    if METRICS[row.metric].probe:
        return SuiteSet(row, files, train=_training_files(folder, files))
    names_file, templates_file = folder / CLASS_NAMES, folder / TEMPLATES
    of_set = evaluation.model_copy(
        update={
            "zero_shot": files,
            "class_names": lines(str(names_file)) if names_file.exists() else (),
            "templates": _templates(templates_file, evaluation, public=bool(row.source)),
        }
    )
    try:
        return SuiteSet(row, files, class_names(of_set), templates(of_set))
    except InputError as problem:
        raise InputError(_of_files(str(problem), names_file, templates_file)) from None


def _of_files(problem: str, names: Path, sentences: Path) -> str:
    """Returns a message about keys as one about the files that stand for them."""
    return problem.replace("eval.class_names", str(names)).replace("eval.templates", str(sentences))


def _metric(folder: Path) -> str:
    """Returns the metric of an own set. dataset_type.txt names its task, by default classification."""
    file = folder / TYPE
    kind = " ".join(lines(str(file))) if file.exists() else ""
    if kind not in _TYPES:
        raise InputError(f'{file} says "{kind}"; known are classification, retrieval and choice')
    return _TYPES[kind]


def _files(folder: Path) -> tuple[str, ...]:
    return _files_in(folder / SPLIT if (folder / SPLIT).is_dir() else folder)


def _training_files(folder: Path, tested: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the shards or the folder of a set's training part, which lies in its folder or beside it.

    Raises InputError if it is not there, or if its folders are those of other classes.
    """
    beside = folder.with_name(f"{folder.name.removesuffix(f'_{SPLIT}')}_{TRAIN}")
    places = [place for place in (folder / TRAIN, beside / TRAIN, beside) if os.path.isdir(place)]
    if not places:
        raise InputError(f"there is no folder {folder / TRAIN}, from which a probe learns")
    files = _files_in(places[0])
    classes = [class_folders(root) if (root := image_folder(each)) else None for each in (files, tested)]
    if classes[0] != classes[1]:
        raise InputError(
            f"{places[0]} does not have the classes of {tested[0]}: both need the same folders, or shards"
        )
    return files


def _files_in(place: Path) -> tuple[str, ...]:
    shards = sorted((str(path) for path in place.glob("*.tar") if path.is_file()), key=natural_order)
    count = place / SHARD_COUNT
    if count.is_file() and (wanted := "".join(lines(str(count)))) != str(len(shards)):
        raise InputError(f"{place} holds {many(len(shards), 'shard')}, and {SHARD_COUNT} says {wanted}")
    if not shards and not class_folders(str(place)):
        raise InputError(f"{place} holds neither shards (*.tar) nor a folder for each class")
    return tuple(shards) or (str(place),)


def _templates(file: Path, evaluation: Eval, *, public: bool) -> str | tuple[str, ...]:
    """Returns the sentences of the set; without a file those of the job, but for a public set.

    Its published results are made with its own.
    """
    if public or file.exists():
        return tuple(line.replace("{c}", "{}") for line in lines(str(file)))
    return evaluation.templates


_LONGEST = 180
"""Characters of a file's name that say which sets it has; the names of more are cut off, with a checksum."""
_HEAD = ("data set", "metric", "value", "samples", "seconds")


def warn_of_missing(evaluation: Eval) -> None:
    """Print the sets of the suite that are not measured, each with the reason and where it comes from."""
    if not evaluation.suite.names:
        return
    missing = find_sets(evaluation).missing
    for line in explained(missing):
        say(f"not measured: {line}")
    if missing:
        say(LAYOUT)
    for name, why in unsupported_sets(evaluation).items():
        say(f"not supported: {name}: {why}")


def keep_suite(
    job: Job, about: Mapping[str, Any], results: Sequence[Mapping[str, Any]], *, table: bool
) -> dict[str, Any]:
    """Returns the suite's results as JSON has them; writes them into the run folder, if there is one.

    With `table`, they are printed on stderr too.
    """
    measured = [each for each in results if "value" in each]
    missing = find_sets(job.eval).missing
    summary = {
        "names": list(job.eval.suite.names),
        "sets": list(results),
        "mean": sum(each["value"] for each in measured) / len(measured) if measured else None,
        "missing": [{"name": m.row.name, "why": m.why, "source": m.row.source} for m in missing],
        "unsupported": unsupported_sets(job.eval),
    }
    if table:
        print(shown("\n".join(_table(measured, len(results) + len(missing)))), file=sys.stderr)
    if run := run_of_weights(job.model.pretrained):
        _write(*run, job, {**about, **summary})
    return summary


def _table(measured: Sequence[Mapping[str, Any]], total: int) -> Iterator[str]:
    """Yields the lines of the table, with the mean of the values last."""
    if not measured:
        return
    rows = [
        (
            each["name"],
            METRICS[each["metric"]].title,
            f"{each['value']:.2%}",
            f"{each['samples']:,}",
            f"{each['seconds']:.1f}",
        )
        for each in measured
    ]
    mean = sum(each["value"] for each in measured) / len(measured)
    yield from aligned(
        [_HEAD, *rows, (f"mean of {len(measured)} of {many(total, 'set')}", "", f"{mean:.2%}", "", "")]
    )


def _write(folder: Path, step: int, job: Job, content: Mapping[str, Any]) -> None:
    average = "-ema" if Path(job.model.pretrained or "").name == EMA_WEIGHTS else ""
    names = "+".join(re.sub("[/:]", "-", name) for name in job.eval.suite.names)
    if len(names) > _LONGEST:
        names = f"{names[:_LONGEST]}-{hashlib.sha256(names.encode()).hexdigest()[:12]}"
    path = folder / EVALUATIONS / f"{names}-step-{step:08d}{average}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, masked_values({**content, "step": step, "ema": bool(average)}))
    except OSError as error:
        say(f"{path}: the results are NOT WRITTEN: {error.strerror}")
