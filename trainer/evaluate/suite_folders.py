"""Finds the data sets of a suite on disk, laid out as CLIP_benchmark and DataComp do.

FOLDER/test/*.tar with samples of an image and its class number (.cls) or captions (.txt); test/nshards.txt
counts the shards; classnames.txt and zeroshot_classification_templates.txt, with {c} for the class name, make
the sentences; dataset_type.txt says "retrieval" or "choice". The level `test` may be left out, and a folder
of images for each class may take the place of shards. Opens no shard; imports no torch.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from trainer.config import Eval
from trainer.data.image_folder import class_folders, image_folder
from trainer.data.shard_names import natural_order
from trainer.errors import InputError
from trainer.evaluate.inputs import class_names, lines, templates
from trainer.evaluate.suite_table import (
    METRICS,
    OWN,
    PROBES,
    Metric,
    SetRow,
    rows_of,
    split_name,
    unsupported,
)
from trainer.text.wording import many

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
