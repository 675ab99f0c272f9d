"""Reads a job file (TOML) into the typed model, and writes one. Opens no other file; imports no torch."""

import os
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from trainer.config.job import Job
from trainer.config.keys import field_at, path_of, resolved, walk, with_paths_from
from trainer.config.overrides import Override, apply_overrides, parse_overrides
from trainer.config.sections import SECTIONS
from trainer.config.stages import StageProblem, stages_of, with_stage_paths
from trainer.config.tables import merged, toml_text, with_tuples
from trainer.config.toml_lines import Key, Lines, line_of_a_long_key
from trainer.errors import InputError
from trainer.safe_io.plain import open_regular
from trainer.text.masking import looks_secret, masked_values
from trainer.text.paste import word
from trainer.text.wording import many

_MOST_BYTES = 1_000_000  # the limit of a ConfigMap
_RESOLVED = "# Resolved by Clipship: with all defaults, and absolute paths.\n"
"""First line of a job that Clipship wrote."""
_MOST_RESOLVED_BYTES = 16_000_000
"""Limit of such a job: absolute paths and defaults make it larger than the user's file, many times with a
list of shards."""
_MOST_LEVELS = 64
_INTEGERS = 2**63
_TWICE = re.compile(r"Cannot declare \((.*)\) twice")
"""Message of tomllib about a section that stands twice, with the parts of its name."""


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Returns the job in the file, with `key=value` overrides applied and its relative paths made absolute.

    Raises InputError with every problem, one per line, each with its place: `job.toml:12: optim.lr: ...`.
    """
    text = _read(path)
    job = _validated(_parse(text, path), str(path), lambda: Lines(text), overrides)
    return resolve_paths(job, Path(os.path.abspath(path)).parent)


def job_from_table(table: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> Job:
    """Returns the job of a table that is in no file, read as by `load_job`.

    Messages name `origin` instead of a file, and relative paths start at the working folder.
    """
    return resolve_paths(_validated(table, origin, lambda: Lines(""), overrides), Path.cwd())


def dump_job(job: Job) -> str:
    """Returns TOML text that loads to an equal job; unset keys are left out, defaults are written."""
    return _RESOLVED + tomli_w.dumps(_with_defaults(job))


def dump_without_secrets(job: Job) -> str:
    """Returns the text of `dump_job` for a place that others may read.

    Variables of [env] that look like secrets are left out, and other such values are masked.
    """
    env = {name: value for name, value in job.env.items() if not looks_secret(name, value)}
    return _RESOLVED + tomli_w.dumps(masked_values({**_with_defaults(job), "env": env}))


def _with_defaults(job: Job) -> dict[str, Any]:
    """Returns all keys of the job but those of schedulers that it does not name.

    Such a section would make it a cluster's job, even an empty one.
    """
    return job.model_dump(exclude_none=True, exclude=SECTIONS.keys() - job.schedulers.keys())


def own_keys(job: Job, *, but_defaults: bool = False) -> dict[str, Any]:
    """Returns what a job says itself: the keys that its file sets, and those that differ from defaults.

    With `but_defaults` a key that the file sets to its default is left out; a scheduler's section stays.
    """
    named: dict[str, Any] = {name: {} for name in job.schedulers}
    changed = merged(named, job.model_dump(exclude_none=True, exclude_defaults=True))
    if but_defaults:
        return changed
    return merged(job.model_dump(exclude_none=True, exclude_unset=True), changed)


def recorded(job: Job) -> dict[str, Any]:
    """Returns the job as checkpoints and other services keep it, for others to read.

    [env] is left out, and secrets, such as those in URLs, are masked.
    """
    table: dict[str, Any] = masked_values(job.model_dump(mode="json", exclude={"env"}))
    return table


@cache
def key_defaults() -> dict[str, Any]:
    """Returns the default of every key of the job file; of a list as a list."""
    defaults = {
        ".".join(key): field.get_default(call_default_factory=True)
        for key, field in walk(Job)
        if not field.is_required()
    }
    return {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}


def resolve_paths(job: Job, base: Path) -> Job:
    """Returns the job with relative paths joined to `base` (absolute), and `~/` replaced by the home folder.

    Idempotent.
    """
    return with_paths_from(with_stage_paths(job, base), base)


def from_here(overrides: Sequence[str]) -> tuple[str, ...]:
    """Returns `key=value` texts of `--set` with relative paths joined to the current folder. Idempotent.

    They are made absolute before anything else reads them: ranks, a later start and a clone have another
    folder. Paths of a job file start at its folder.

    Raises InputError for a text of another form, and as `resolved` does.
    """
    changes = parse_overrides(overrides)
    return tuple(_absolute(text, change) for text, change in zip(overrides, changes, strict=True))


def _absolute(text: str, change: Override) -> str:
    typed = change.text if change.is_bare() else change.value
    absolute = _resolved(typed, change.key)
    if absolute == typed:
        return text
    return f"{text.partition('=')[0]}={toml_text(absolute)}"


def _resolved(value: Any, key: Key) -> Any:
    """Returns the value of a key, or of a section's keys, with absolute paths."""
    if isinstance(value, dict):
        return {name: _resolved(inner, (*key, name)) for name, inner in value.items()}
    field = field_at(Job, key)
    mark = path_of(field) if field is not None else None
    if (
        mark is None or not value or (isinstance(value, list) and "" in value)
    ):  # empty texts are refused later
        return value
    absolute = resolved(tuple(value) if isinstance(value, list) else value, mark, Path.cwd(), key)
    return list(absolute) if isinstance(absolute, tuple) else absolute


def _read(path: Path) -> str:
    try:
        with open(path, "rb", opener=open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            is_resolved = file.read(len(_RESOLVED)) == _RESOLVED.encode()
            most = _MOST_RESOLVED_BYTES if is_resolved else _MOST_BYTES
            if size > most:
                raise InputError(
                    f"{path} has {many(size, 'byte')} and is not a job file, which has at most {most:,}"
                )
            file.seek(0)
            return file.read(most).decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(
            f"{path}: no such job file; `clipship init --preset laptop {word(path)}` writes one"
        ) from None
    except IsADirectoryError:
        raise InputError(
            f"{path} is a folder: give the job file itself, for example {path / 'job.toml'}"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text (byte {error.start}): a job file is a TOML text file"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _parse(text: str, path: Path) -> dict[str, Any]:
    if line := line_of_a_long_key(text, _MOST_LEVELS):  # tomllib would take minutes for it
        raise InputError(
            f"{path}:{line}: a key with more than {_MOST_LEVELS} parts; no key of a job file has so many"
        )
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{path}: not a job file: its values are nested too deeply") from None
    except ValueError as error:
        raise InputError(_syntax_problem(str(error), text, path)) from None


def _syntax_problem(problem: str, text: str, path: Path) -> str:
    """Returns the message for a syntax error, with the line number in front; tomllib puts it at the end."""
    at = re.search(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$", problem)
    line = at[1] if at and at[1] else str(text.count("\n") + 1)
    column = f", column {at[2]}" if at and at[2] else ""
    what = problem[: at.start()] if at else problem
    if twice := _TWICE.fullmatch(what):
        name = ".".join(re.findall(r"'([^']*)'", twice[1]))
        header = re.compile(rf"\s*\[\s*{re.escape(name)}\s*\]")
        first = next((number for number, text in enumerate(text.split("\n"), 1) if header.match(text)), None)
        there = f", which line {first} begins" if first else ""
        return f"{path}:{line}: section [{name}] stands here again: move its keys into the first one{there}"
    if what == "Cannot overwrite a value":
        return f"{path}:{line}: this key stands in its section already: remove one of the two"
    return f"{path}:{line}: not valid TOML{column}: {what}; write texts in quotes, sections in [brackets]"


def _validated(
    table: dict[str, Any], origin: str, lines: Callable[[], Lines], overrides: Sequence[str]
) -> Job:
    changes = parse_overrides(overrides)
    apply_overrides(table, changes)
    if odd := _odd_value(table):
        raise _refusal([odd], origin, lines(), changes)
    try:
        job = _typed(table, changes)
        stages_of(job)
    except StageProblem as problem:
        raise _refusal(problem.problems, origin, lines(), changes) from None
    except ValidationError as problem:
        raise _refusal(problem, origin, lines(), changes) from None
    return job


def _typed(table: dict[str, Any], changes: Sequence[Override]) -> Job:
    """Returns the job of a table. Raises ValidationError.

    An override may have given a text that looks like a number: then it is tried as a text.
    """
    try:
        return _as_job(table)
    except ValidationError as error:
        text_keys = [
            problem["loc"] for problem in error.errors(include_url=False) if problem["type"] == "string_type"
        ]
    meant_as_text = [
        change
        for change in changes
        if change.is_bare() and any(key[: len(change.key)] == change.key for key in text_keys)
    ]
    apply_overrides(table, [replace(change, value=change.text) for change in meant_as_text])
    return _as_job(table)


def _as_job(table: dict[str, Any]) -> Job:
    job: Job = Job.model_validate(with_tuples(table))
    return job


def _refusal(
    problems: ValidationError | Sequence[tuple[Key, str]],
    origin: str,
    lines: Lines,
    changes: Sequence[Override],
) -> InputError:
    from trainer.config.messages import placed, problem_texts  # a job that is right waits for no words

    texts = problem_texts(problems) if isinstance(problems, ValidationError) else problems
    return InputError("\n".join(placed(texts, origin, lines, changes)))


def _odd_value(table: dict[str, Any]) -> tuple[Key, str] | None:
    """Returns the first key with a value that TOML does not guarantee to hold or nested too deep, and why.

    Returns None if there is no such key.
    """
    pending: list[tuple[Key, object, int]] = [((), table, 0)]
    while pending:
        key, value, depth = pending.pop()
        if depth > _MOST_LEVELS:
            return key[:2], f"nested more than {_MOST_LEVELS} levels deep: no key of a job file is"
        if isinstance(value, int) and not -_INTEGERS <= value < _INTEGERS:
            return key, "a number of more than 64 bits; TOML has whole numbers from -2^63 to 2^63 - 1"
        if isinstance(value, dict):
            pending += [((*key, name), inner, depth + 1) for name, inner in value.items()]
        elif isinstance(value, list):
            pending += [(key, inner, depth + 1) for inner in value]
    return None
