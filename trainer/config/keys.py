"""Facts that a key of the job file states at its declaration.

Is it a path, may a resumed run change it, with which other keys has it an effect? A key carries them in its
annotation: `Annotated[Text, JobPath()]`. Path resolution, mounts, checks and the resume rule follow from the
model, so that none of them has a list of keys of its own. Pure; imports no torch.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic.fields import FieldInfo

from trainer.config.toml_lines import Key
from trainer.config.types import AnySection, Section, is_remote
from trainer.errors import InputError
from trainer.text.masking import masked
from trainer.text.paste import as_pattern, with_home
from trainer.text.terminal import one_line

if TYPE_CHECKING:
    from trainer.config.job import Job

_OF_A_SHELL = re.compile(r"\$\{|\$[A-Za-z_]|~[^/]|~\Z")
"""Beginning of a path that only a shell would replace: a variable, or another home folder."""
_LONGEST_NAME = 255
_MOST_FOLDERS = 500  # Path.mkdir recurses once for each folder
_LONGEST_PATH = 4000  # the kernel allows 4,096; a run adds names to its folder's path


class MayChange:
    """Marks a key, or a whole section, that a resumed run may change.

    Such a key decides where and how the run works, not what it computes.
    """


MAY_CHANGE = MayChange()


@dataclass(frozen=True, eq=False)
class OnlyIf:
    """Marks a key, or a whole section, that has an effect only with certain values of other keys.

    `clipship check` names keys that are set without effect; those that share a mark stand on one line.
    """

    used: Callable[["Job"], bool]
    """Function that returns whether the key has an effect in a job."""
    why_not: str
    """Clause that follows a colon if it has none; `{job.SECTION.KEY}` stands for another key's value."""


ON_GPUS = OnlyIf(lambda job: not job.resources.on_cpu, "[resources] asks for the CPU")
ON_CUDA = OnlyIf(
    lambda job: job.resources.row.runs_cuda,
    'it is made for CUDA, and resources.accelerator = "{job.resources.accelerator}"',
)


def _always(_text: str) -> bool:
    return True


@dataclass(frozen=True)
class JobPath:
    """Marks a key whose text is a path.

    A relative path starts at the job file's folder, one of `--set` at the current folder, `~/` at the home
    folder.
    """

    kind: Literal["file", "folder", "patterns"] = "file"
    """Kind of path; patterns are braces, globs, URLs and streams too, as `data.train` takes them."""
    when: Callable[[str], bool] = _always
    """Function that tells a path from other values of the key, such as a model's name or an image in a
    registry."""
    lists: bool = True
    """True: a list holds paths. False: it holds other values, such as class names."""
    ranks: bool = True
    """True: ranks read or write the path, so containers and pods must see it. False: only this machine
    does."""
    made: bool = False
    """True: the first run makes the folder if it is missing."""


def path_of(field: FieldInfo) -> JobPath | None:
    """Returns the mark of a key that is a path; None for other keys."""
    return next((mark for mark in field.metadata if isinstance(mark, JobPath)), None)


def may_change(field: FieldInfo) -> bool:
    """Returns whether a resumed run may change the key, or every key of the section."""
    return any(isinstance(mark, MayChange) for mark in field.metadata)


def conditions_of(field: FieldInfo) -> list[OnlyIf]:
    """Returns the conditions under which a key, or every key of a section, has an effect."""
    return [mark for mark in field.metadata if isinstance(mark, OnlyIf)]


def section_of(field: FieldInfo) -> type[Section] | None:
    """Returns the section that a field of the job file's model holds; None for a key."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def section_at(section: type[Section] | None, key: Key) -> type[Section] | None:
    """Returns the section that a key within `section` names; None for a value or an unknown key."""
    for name in key:
        field = section.model_fields.get(name) if section else None
        section = section_of(field) if field else None
    return section


def field_at(section: type[Section], key: Key) -> FieldInfo | None:
    """Returns the declaration of a key within the section; None for an unknown key."""
    inner = section_at(section, key[:-1])
    return inner.model_fields.get(key[-1]) if inner else None


def walk(section: type[Section], prefix: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Yields every key of the section and of the sections in it, a section before its keys."""
    for name, field in section.model_fields.items():
        key = (*prefix, name)
        yield key, field
        if inner := section_of(field):
            yield from walk(inner, key)


def with_paths_from(section: AnySection, base: Path, within: Key = ()) -> AnySection:
    """Returns a copy of the section in which relative paths are joined to `base` (absolute). Idempotent.

    `within` is the section's own key. Raises InputError for a path that no file system can have.
    """
    changes: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value, mark = getattr(section, name), path_of(field)
        absolute = value
        if mark is not None:
            absolute = resolved(value, mark, base, (*within, name))
        elif isinstance(value, Section) and _has_paths(type(value)):
            absolute = with_paths_from(value, base, (*within, name))
        if absolute != value:
            changes[name] = absolute  # what the file leaves out stays absent
    return section.model_copy(update=changes)


def rank_paths(section: Section) -> Iterator[tuple[str, JobPath]]:
    """Yields absolute local paths and patterns that a resolved job's ranks see, with their keys' marks."""
    for name, field in type(section).model_fields.items():
        value, mark = getattr(section, name), path_of(field)
        if isinstance(value, Section):
            yield from rank_paths(value)
        elif mark is not None and mark.ranks:
            for text in _texts(value, mark):
                if text.startswith("/") and mark.when(text) and not is_remote(text):
                    yield text, mark


def _has_paths(section: type[Section]) -> bool:
    return any(path_of(field) for _, field in walk(section))


def _texts(value: object, mark: JobPath) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, tuple) and mark.lists else ()


def resolved(value: object, mark: JobPath, base: Path, key: Key) -> object:
    """Returns a key's value with its relative paths joined to `base`, which is absolute.

    Raises InputError for a path that no file system can have, for an address where a path must be, and for a
    beginning that only a shell would replace.
    """
    if isinstance(value, tuple) and mark.lists:
        return tuple(resolved(text, mark, base, key) for text in value)
    if not isinstance(value, str) or not mark.when(value) or (mark.kind == "patterns" and is_remote(value)):
        return value
    if _OF_A_SHELL.match(value):
        raise InputError(
            f"{'.'.join(key)}: {one_line(masked(value))[:80]} is taken as it stands, as no shell reads a job "
            "file, and only `~/` is the home folder: write the whole path, or ./ before such a name"
        )
    if mark.kind == "patterns":
        return os.path.join(as_pattern(base), with_home(value))
    if "://" in value:
        raise InputError(
            f"{'.'.join(key)}: {one_line(masked(value))[:80]} is an address, and this key takes a path: give "
            f"a {mark.kind} that this machine and the ranks see"
        )
    _refuse_long(value)
    return str(base / (os.path.expanduser(value) if value.startswith("~/") else value))


def _refuse_long(path: str) -> None:
    """Raises InputError for a path that no file system can have, which file calls would refuse by OSError."""
    parts = path.split("/")
    longest = max(len(os.fsencode(part)) for part in parts)
    if len(os.fsencode(path)) > _LONGEST_PATH or longest > _LONGEST_NAME or len(parts) > _MOST_FOLDERS:
        raise InputError(
            f"{one_line(masked(path))[:60]}...: too long for a path: file systems have names of at most "
            f"{_LONGEST_NAME} bytes, in paths of at most {_LONGEST_PATH:,} and {_MOST_FOLDERS} folders"
        )
