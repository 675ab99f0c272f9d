"""Expands the patterns of a job file to the files that they name.

It lists folders and, for globs in addresses, object storage, and opens nothing; imports no torch.
"""

import glob
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count

from braceexpand import braceexpand

from trainer.config import is_remote, is_stream
from trainer.config.stores import WEB, Address
from trainer.data.answers import is_absent, is_denied
from trainer.data.files import file_system, persistent
from trainer.errors import InputError, StorageError
from trainer.text.wording import many

_MOST_NAMES = 1_000_000
_LIST = re.compile(r"\{[^{}]*,[^{}]*\}")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_PLACE = re.compile(r"\0(\d+)\0")
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?\d+)?\}")


def expand_shards(patterns: Sequence[str]) -> list[str]:
    """Returns the files that patterns (braces, globs, plain names) name, in the order given.

    Matches of a glob come in natural order; those of a glob in an address are asked of its storage. Other
    names that are no path (`pipe:`, URLs) are expanded but not checked. Tables are found in the same way.
    Raises InputError, which lists every pattern that is empty or matches nothing, every missing file by its
    pattern, and files that come twice, also by other names, and StorageError if storage does not answer.
    """
    names: list[str] = []
    problems: list[str] = []
    for pattern in patterns:
        try:
            names += _expand(pattern)
        except StorageError:
            raise
        except InputError as problem:
            problems.append(str(problem))
    if twice := _twice(names):
        problems.append(
            f"{_few(twice)}: named more than once, so the same samples would come more than once in an epoch"
        )
    if problems or not names:
        raise InputError("\n".join(problems) or "no shards and no tables are named")
    return names


def refuse_streams(patterns: Sequence[str]) -> None:
    """Raises InputError, for a command that reads by offset, if a pattern names a stream."""
    if streams := list(filter(is_stream, patterns)):
        raise InputError(f"{streams[0]} is a stream, which this command cannot read: name files or URLs")


def expand_key(key: str, patterns: Sequence[str]) -> list[str]:
    """Runs `expand_shards`; its problems begin with the job file's key that holds the patterns."""
    try:
        return expand_shards(patterns)
    except InputError as problem:
        lines = "\n".join(f"{key}: {line}" for line in str(problem).splitlines())
        raise type(problem)(lines) from None


def expand_names(pattern: str) -> list[str]:
    """Returns the files and folders that one pattern names; empty if there are none or it is no path."""
    if is_remote(pattern) or not pattern.strip():
        return []
    if os.path.lexists(pattern):
        return [pattern]
    return [match for name in braces(pattern) for match in _matches(name, os.path.lexists)]


def natural_order(name: str) -> list[tuple[int, str]]:
    """Returns a sorting key that puts shard-9 before shard-10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]


def _twice(names: Sequence[str]) -> list[str]:
    """Returns the files that are named more than once, each by its names; an address has one name."""
    real_folder = cache(os.path.realpath)
    places: dict[str, list[str]] = {}
    for name in names:
        folder, file = os.path.split(name)
        if is_remote(name):
            place = name
        elif os.path.islink(name):
            place = os.path.realpath(name)
        else:
            place = os.path.join(real_folder(folder), file)
        places.setdefault(place, []).append(name)
    return [" = ".join(dict.fromkeys(same)) for same in places.values() if len(same) > 1]


def _expand(pattern: str) -> list[str]:
    if not pattern.strip():
        raise InputError(
            "an empty pattern names no file: give shards (data/{0000..0099}.tar, data/*.tar) or a table "
            "(data/train.csv)"
        )
    if is_remote(pattern):
        return [name for address in braces(pattern) for name in _listed(address)]
    if os.path.isfile(pattern):
        return [pattern]
    files: list[str] = []
    missing: list[str] = []
    for name in braces(pattern):
        matches = _matches(name)
        files += matches
        missing += [] if matches else [name]
    if missing:
        raise InputError(_missing(pattern, files, missing))
    return files


def _listed(address: str) -> Sequence[str]:
    """Returns the files that an address with a glob names; any other address, and a stream, as it is."""
    web = address.startswith(WEB)
    if is_stream(address):
        return [address]
    if not ("*" in address.partition("?")[0] if web else glob.has_magic(address)):
        return [str(Address(address))]  # it is no chain
    if web:
        raise InputError(
            f"{address}: a web server does not list its files: name them with braces ({{0000..0099}})"
        )
    return _in_store(address)


@cache
def _in_store(pattern: str) -> Sequence[str]:
    """Returns the files behind an address with a glob, or whose name looks like one.

    A process lists them once and goes by that, so that all it does is about the same files.
    """
    protocol = pattern.partition("://")[0]

    def listed() -> list[str]:
        files = file_system(pattern)
        files.invalidate_cache()
        try:
            if files.info(pattern)["type"] == "file":  # a name may have brackets
                return [pattern]
        except Exception as error:
            if not (is_absent(error) or is_denied(pattern, error)):  # keys may list a folder and no more
                raise
        matches = files.glob(pattern, detail=True).items()
        found = [f"{protocol}://{name}" for name, about in matches if about["type"] == "file"]
        files.invalidate_cache()  # else it would know a changed file by this list
        if len(found) > _MOST_NAMES:
            raise InputError(
                f"{pattern}: {many(len(found), 'file')} match; at most {_MOST_NAMES:,} are allowed"
            )
        return found

    if found := persistent(pattern, listed):
        return sorted(found, key=natural_order)
    raise InputError(f"{pattern}: no file matches")


def _matches(name: str, wanted: Callable[[str], bool] = os.path.isfile) -> list[str]:
    if wanted(name):
        return [name]
    return (
        sorted(filter(wanted, glob.glob(name, recursive=True)), key=natural_order)
        if glob.has_magic(name)
        else []
    )


def braces(pattern: str) -> list[str]:
    """Returns the names that the braces of a pattern stand for. Raises InputError."""
    total = math.prod(abs(int(end) - int(begin)) + 1 for begin, end in _RANGE.findall(pattern))
    total *= math.prod(group.count(",") + 1 for group in _LIST.findall(pattern))
    if total > _MOST_NAMES:
        raise InputError(
            f"{pattern}: its braces stand for {many(total, 'name')}; at most {_MOST_NAMES:,} are allowed"
        )
    try:
        return list(_of_command(pattern) if is_stream(pattern) else braceexpand(pattern))
    except ValueError as problem:
        raise InputError(
            f"{pattern}: cannot expand its braces ({problem}): write {{0000..0099}} or {{train,extra}}"
        ) from None


def _of_command(pattern: str) -> Iterator[str]:
    """Yields the commands of a stream: backslashes are the shell's, keep braces from expansion, and stay."""
    pairs = _ESCAPED.findall(pattern)
    places = count()
    for command in braceexpand(_ESCAPED.sub(lambda _: f"\0{next(places)}\0", pattern)):
        yield _PLACE.sub(lambda place: pairs[int(place[1])], command)


def _missing(pattern: str, matches: Sequence[str], missing: Sequence[str]) -> str:
    """Returns a message: the files that were not found, the folder, and what it holds instead."""
    if os.path.isdir(pattern):
        return (
            f"{pattern} is a folder: name the files, for example {os.path.join(pattern, '*.tar')}; "
            f"{_contents(pattern)}"
        )
    folder = os.path.dirname(missing[0])
    what = (
        f"{len(missing)} of {len(matches) + len(missing)} files are missing"
        if matches or len(missing) > 1
        else "no such file"
    )
    which = f": {_few([os.path.basename(name) for name in missing])}" if matches or len(missing) > 1 else ""
    if glob.has_magic(missing[0]) and len(missing) == 1:
        what, which = "no file matches", ""
    return f"{pattern}: {what}{which}; {_contents(folder)}"


def _contents(folder: str) -> str:
    """Returns the names of some files in the folder, for a message."""
    if glob.has_magic(folder) and not os.path.isdir(folder):
        parents = [parent for parent in glob.glob(folder, recursive=True) if os.path.isdir(parent)]
        if not parents:
            return _contents(os.path.dirname(folder))
        folder = parents[0]
    try:
        held = [entry.name + "/" * entry.is_dir() for entry in os.scandir(folder or ".")]
    except FileNotFoundError:
        return f"there is no folder {folder}"
    except (OSError, ValueError) as problem:
        return f"the folder {folder or '.'} cannot be read ({getattr(problem, 'strerror', None) or problem})"
    if not held:
        return f"the folder {folder or '.'} is empty"
    return f"the folder {folder or '.'} holds {_few(sorted(held, key=natural_order))}"


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
