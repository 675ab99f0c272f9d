"""Reads the inputs of the evaluation: its data, its class names and its templates.

Names and templates come from the job, a file or folders. Imports no torch.
"""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path

from trainer.config import Eval, Job, is_remote
from trainer.config.results import NAMED_SET
from trainer.data.check import check_data
from trainer.data.image_folder import class_folders, image_folder, spoken
from trainer.data.shard_names import expand_key
from trainer.data.store import read
from trainer.errors import InputError, raise_problems
from trainer.evaluate.template_sets import NotInstalled, class_name_set, template_set
from trainer.text.wording import many


def class_names(evaluation: Eval) -> tuple[str, ...]:
    """Returns the names by class number.

    Raises InputError as `lines` does, and if there are not as many names as class folders.
    """
    folder = image_folder(evaluation.zero_shot)
    folders = class_folders(folder) if folder else []
    if given := evaluation.class_names:
        names = (
            class_name_set(given.removeprefix(NAMED_SET))
            if isinstance(given, str) and given.startswith(NAMED_SET)
            else _lines_of_key("eval.class_names", given)
        )
        if folders and len(names) != len(folders):
            raise InputError(
                f"eval.class_names gives {many(len(names), 'name')}, but {folder} holds {len(folders)} class "
                "folders: "
                "give one name per folder"
            )
        return names
    if not folders:
        raise InputError(
            "eval.class_names: give the names in the order of the class numbers; "
            "only a folder with one folder per class needs no names"
        )
    return tuple(map(spoken, folders))


def templates(evaluation: Eval) -> tuple[str, ...]:
    """Returns sentences with `{}` for the class name.

    Raises InputError as `lines` does, and for a line without `{}` or with other braces.
    """
    given = evaluation.templates
    if isinstance(given, str) and given.startswith(NAMED_SET):
        return template_set(given.removeprefix(NAMED_SET))
    sentences = _lines_of_key("eval.templates", given)
    for number, line in enumerate(sentences, start=1):
        place = repr(line) if isinstance(evaluation.templates, tuple) else f"{evaluation.templates}:{number}"
        if "{}" not in line:
            raise InputError(f"eval.templates: {place}: this template has no {{}} for the class name")
        if not _takes_a_name(line):
            raise InputError(
                f"eval.templates: {place}: a template has the class name once, as {{}}; "
                f"write other braces twice: {{{{ and }}}}"
            )
    return sentences


def _takes_a_name(template: str) -> bool:
    try:
        return bool(template.format("name"))
    except (KeyError, IndexError, ValueError, AttributeError):
        # The template has another field, a second one, a single brace, or an attribute.
        return False


def lines(given: str | tuple[str, ...]) -> tuple[str, ...]:
    """Returns the entries themselves, or the lines of the file that a text names, here or at an address.

    Raises InputError if the file cannot be read or a line is empty.
    """
    if isinstance(given, tuple):
        return given
    try:
        with io.TextIOWrapper(io.BytesIO(_content(given)), encoding="utf-8-sig") as file:
            text = file.read().rstrip()
    except OSError as problem:
        raise InputError(
            f"{given} cannot be read ({problem.strerror}): "
            "give a file with one entry per line, or a list in brackets"
        ) from None
    except UnicodeDecodeError:
        raise InputError(f"{given} is not UTF-8 text") from None
    entries = tuple(line.strip() for line in text.split("\n"))
    if "" in entries:
        raise InputError(
            f"{given}:{entries.index('') + 1}: this line is empty; each line must hold one entry"
        )
    return entries


def _content(given: str) -> bytes:
    if not is_remote(given):
        return Path(given).read_bytes()
    if (content := read(given)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), given)
    return content


def check_retrieval(job: Job) -> None:
    """Raises InputError, which lists what is missing or unreadable of the retrieval set.

    A job without one is fine.
    """
    if job.eval.retrieval:
        check_data(job.retrieval_data, "eval.retrieval")


def check_evaluation(evaluation: Eval) -> None:
    """Raises InputError, which lists what is wrong with the zero-shot set, its class names and templates.

    It is fine if the job has no zero-shot set. Names that the ranks have, and this machine has not, are left
    to them.
    """
    problems: list[str] = []
    checks: tuple[Callable[[], object], ...] = (
        lambda: image_folder(evaluation.zero_shot) or expand_key("eval.zero_shot", evaluation.zero_shot),
        lambda: class_names(evaluation),
        lambda: templates(evaluation),
    )
    for check in checks:
        try:
            if evaluation.zero_shot:
                check()
        except NotInstalled:
            continue
        except InputError as problem:
            problems.append(str(problem))
    raise_problems(problems)


def _lines_of_key(key: str, given: str | tuple[str, ...]) -> tuple[str, ...]:
    try:
        return lines(given)
    except InputError as problem:
        raise InputError(f"{key}: {problem}") from None
