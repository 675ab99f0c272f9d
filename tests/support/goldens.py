"""Whole texts that tests compare with: some stored whole, the others as their difference from one of these.

A difference is a unified one, but `@@` is followed by the line above the change, not by line numbers. So a
line that a template gains changes the whole texts and none of the differences from them.
"""

import difflib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SUFFIX = ".diff"


def difference(old: list[str], new: list[str]) -> Iterator[str]:
    """Yields the changes from old to new, each below as many lines as it takes to tell its place."""
    done = 0
    for kind, start, end, first, last in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        if kind == "equal":
            continue
        place = start
        while _find(old, done, _above(old, place), old[place:end]) != place:
            place -= 1
        yield f"@@ {_above(old, place)}"
        yield from (f" {line}" for line in old[place:start])
        yield from (f"-{line}" for line in old[start:end])
        yield from (f"+{line}" for line in new[first:last])
        done = end


def apply(old: list[str], changes: list[str]) -> list[str]:
    """Returns the new lines. Raises ValueError if a change fits nowhere."""
    new: list[str] = []
    done = 0
    starts = [place for place, line in enumerate(changes) if line.startswith("@@ ")]
    for start, end in itertools.pairwise([*starts, len(changes)]):
        change = changes[start + 1 : end]
        taken = [line[1:] for line in change if line[0] in " -"]
        place = _find(old, done, changes[start].removeprefix("@@ "), taken)
        new += [*old[done:place], *(line[1:] for line in change if line[0] in " +")]
        done = place + len(taken)
    return new + old[done:]


def _above(lines: list[str], place: int) -> str:
    return lines[place - 1] if place else ""


def _find(lines: list[str], start: int, above: str, wanted: list[str]) -> int:
    for place in range(start, len(lines) - len(wanted) + 1):
        if _above(lines, place) == above and lines[place : place + len(wanted)] == wanted:
            return place
    raise ValueError(f"no change fits below {above!r}")


def read(folder: Path, name: str) -> str:
    """Returns a golden's text. Raises OSError if it is missing, ValueError if its difference does not fit."""
    if (path := folder / name).exists():
        return path.read_bytes().decode()
    lines = (folder / (name + SUFFIX)).read_bytes().decode().removesuffix("\n").split("\n")
    whole = (folder / lines[0].removeprefix("--- ")).read_bytes().decode()
    return "\n".join(apply(whole.split("\n"), lines[2:]))


def check(folder: Path, name: str, text: str) -> None:
    """Fails the test, and shows what differs, unless the text is the golden's."""
    try:
        golden = read(folder, name)
    except (OSError, ValueError) as error:
        pytest.fail(f"The golden {name} cannot be read ({error}): `make goldens` writes it.", pytrace=False)
    if text != golden:
        lines = difflib.unified_diff(golden.split("\n"), text.split("\n"), "golden", "now", lineterm="")
        message = f"{name} differs from its golden. If that is wanted, run `make goldens`."
        pytest.fail("\n".join([message, *lines]), pytrace=False)


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Writes these texts over those of the folder, and each difference anew.

    What is stored whole stays whole. To store another text whole, make an empty file of its name first; to
    store it as a difference, remove that file.
    """
    names = {path.relative_to(folder).as_posix().removesuffix(SUFFIX) for path in folder.rglob("*.*")}
    texts = {name: read(folder, name) for name in names - texts.keys()} | dict(texts)
    wholes = {name: text for name, text in texts.items() if (folder / name).exists()}
    for name in sorted(texts.keys() - wholes.keys()):
        if nearest(wholes, name, texts[name]) is None:
            wholes[name] = texts[name]
    for name, text in texts.items():
        changes = None if name in wholes else nearest(wholes, name, text)
        path = folder / (name if changes is None else name + SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((changes or text).encode())
        if name in wholes:
            (folder / (name + SUFFIX)).unlink(missing_ok=True)


def nearest(wholes: Mapping[str, str], name: str, text: str) -> str | None:
    """Returns the shortest difference from one of these, as a file has it; None if the text is no longer."""
    lines = text.split("\n")
    differences = [
        [f"--- {whole}", f"+++ {name}", *difference(wholes[whole].split("\n"), lines)]
        for whole in sorted(wholes)
    ]
    best = min(differences, key=len, default=lines)
    return "\n".join([*best, ""]) if len(best) < len(lines) else None
