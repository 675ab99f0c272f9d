"""Values of `[slurm]` in Slurm's own notation: times, generic resources, file names. Imports no pydantic."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainer.sysinfo.own_table import own_table

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d|[01]\d|2[0-3])(?::(?P<rest>[0-5]\d(?::[0-5]\d)?))?"
    r"|(?P<plain>\d+(?::[0-5]\d){0,2}))",
    re.ASCII,
)
_WORD = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
MEMORY = re.compile(r"(?P<count>[1-9]\d*)(?P<unit>[KMGT]?)|0", re.ASCII)
_COUNT = re.compile(r"([1-9]\d*)[KMGT]?", re.ASCII)
_REPLACED = re.compile(r"%(.?)", re.DOTALL)
_KNOWN = ("j", "x", "u", "A", "a", "%")
"""Letters behind a % in a file's name that do not depend on the node."""


def memory_bytes(text: str) -> int | None:
    """Returns the bytes of an amount of memory such as "480G"; None for "0", which is all of a node.

    A number without a unit is in MiB. Raises ValueError for another text.
    """
    if (match := MEMORY.fullmatch(text)) is None:
        raise ValueError(
            f'"{text}" is not an amount of memory for Slurm; write a whole number and one of K, M, G, '
            'T, such as "480G", or "0" for all of a node'
        )
    if match["count"] is None:
        return None
    return int(match["count"]) << 10 * ("KMGT".index(match["unit"] or "M") + 1)


@dataclass(frozen=True)
class Gres:
    """Generic resources that a job asks of each node."""

    name: str
    type: str | None
    count: int


def parse_gres(text: str) -> Gres:
    """Returns what "NAME[:TYPE][:COUNT]" asks for. Raises ValueError for another text."""
    name, *rest = text.split(":")
    count = _COUNT.fullmatch(rest[-1]) if rest else None
    types = rest[:-1] if count else rest
    if len(types) > 1 or not all(map(_WORD.fullmatch, (name, *types))):
        raise ValueError(
            f'"{text}" is no generic resource: write "NAME[:TYPE][:COUNT]", such as "gpu:h100:8" or "nvme:1"'
        )
    return Gres(name, types[0] if types else None, int(count[1]) if count else 1)


def check_output(pattern: str) -> None:
    """Raises ValueError for a file name whose parts Slurm replaces by what is not known beforehand."""
    folder, _, name = pattern.rpartition("/")
    if not pattern.isprintable():
        raise ValueError(f"{pattern!r} has a character that is not printable: rename its folder")
    if not name:
        raise ValueError(f'"{pattern}" is a folder: name a file in it, such as "{pattern}%x-%j.out"')
    if "%" in folder:
        raise ValueError(f'"{pattern}": Slurm makes no folders, so that only the file name may have a %')
    if wrong := [found[0] for found in _REPLACED.finditer(name) if found[1] not in _KNOWN]:
        raise ValueError(f'"{pattern}" has {wrong[0]}: known are %j, %x, %u, %A, %a, and %% for a %')
    if "%j" not in name and "%A" not in name:
        raise ValueError(f'"{pattern}" needs %j, the id of the job: else two jobs would write one file')


def output_file(pattern: str, job_id: str, name: str, user: str) -> str:
    """Returns the file that Slurm makes of a pattern; `job_id` is a job's, or 12_3 for a task of an array."""
    array, _, task = job_id.partition("_")
    values = {"j": job_id, "A": array, "a": task, "x": name, "u": user, "%": "%"}
    return _REPLACED.sub(lambda found: values.get(found[1], found[0]), pattern)


def seconds(time: str) -> int:
    """Returns the seconds of a time limit in Slurm's notation. Raises ValueError for another text."""
    match = TIME.fullmatch(time)
    if match is None:
        raise ValueError(time)
    if match["plain"] is None:
        minutes, _, seconds = (match["rest"] or "0").partition(":")
        return ((int(match["days"]) * 24 + int(match["hours"])) * 60 + int(minutes)) * 60 + int(seconds or 0)
    parts = [int(part) for part in match["plain"].split(":")]
    if len(parts) < 3:  # minutes, and seconds
        parts = [0, *parts]
    return sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))


def check_options(
    options: Mapping[str, str | bool], program: Literal["sbatch", "srun"], example: str
) -> None:
    """Raises ValueError for options that are none, that follow from other keys or that no key sets.

    Slurm's programs take the beginning of an option's name for the option.
    """
    if not options:
        return
    table = own_table(__file__, "slurm_options.toml")[program]
    refused = {option: f"follows from {key}: change that instead" for option, key in table["own"].items()}
    refused |= {option: f"cannot be set: {reason}" for option, reason in table["fixed"].items()}
    for name, given in options.items():
        if not _OPTION.fullmatch(name):
            raise ValueError(
                f'"{name}" is not a long option of {program}; write it without the dashes: {example}'
            )
        if name in refused:
            raise ValueError(f"{name} {refused[name]}")
        if name not in table["whole"] and (longer := [each for each in refused if each.startswith(name)]):
            raise ValueError(f"{name} is short for {longer[0]} to {program}, and that {refused[longer[0]]}")
        if isinstance(given, str) and not given.isprintable():
            raise ValueError(f"{name} = {given!r} must be one line of printable characters")
