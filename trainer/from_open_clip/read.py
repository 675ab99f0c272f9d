"""Reads a command line of open_clip_train by the table, as its own parser (argparse) would."""

import argparse
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from trainer.errors import InputError
from trainer.from_open_clip.data_flags import literal_pairs
from trainer.from_open_clip.line import RELEASES, Line, with_model_defaults
from trainer.from_open_clip.table import FLAGS, flags_of
from trainer.text.near import near

_PROGRAMS = ("open_clip_train.main", "training.main", "open_clip_train/main.py", "training/main.py")
_RANKS = ("--nproc_per_node", "--nproc-per-node")
_NODES = ("--nnodes",)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"open_clip_train's command line: {message}")


def read(arguments: Sequence[str], gpus: int | None, release: str | None = None) -> Line:
    """Returns the command line, with open_clip_train's defaults.

    `arguments` may begin with the program itself (torchrun ... -m open_clip_train.main ...); the number of
    ranks that torchrun is told then counts if `gpus` is None. `release` is one of RELEASES; None takes the
    first one that has all flags of the line. Raises InputError for what open_clip_train would refuse.
    """
    before, own = _without_program(arguments)
    own = [text for text in own if text != "--"]  # a shell's wrapper may leave one more
    release = release or _release(own)
    named, unknown = _parsed(own, release)
    if unknown:
        problems = [_unknown(text, release) for text in unknown if text.startswith("-")]
        raise InputError(
            "\n".join(problems or [f"{unknown[0]} belongs to no flag of open_clip_train {release}"])
        )
    if "--aug-cfg" in named:
        named["--aug-cfg"] = literal_pairs(named["--aug-cfg"])
    values: dict[str, Any] = {name: flag.default_in(release) for name, flag in FLAGS.items()} | named
    for name in ("--batch-size", "--accum-freq"):
        if values[name] < 1:
            raise InputError(f"{name} {values[name]}: must be at least 1")
    nodes = 1 if gpus else _told(before, _NODES) or 1
    here = _told(before, _RANKS)
    ranks = gpus or (here or 1) * nodes
    return Line(with_model_defaults(values), frozenset(named), ranks, nodes, release)


def _parsed(own: Sequence[str], release: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the values of the flags that the release knows, and the rest of the line."""
    parser = _Parser(prog="open_clip_train", add_help=False)
    for flag in flags_of(release):
        names = [name for name in (flag.name, flag.also) if name]
        takes = {**flag.takes_in(release), "default": argparse.SUPPRESS}
        parser.add_argument(*names, dest=flag.name, **takes)
    given, unknown = parser.parse_known_args(own)
    return dict(vars(given)), unknown


def _release(own: Sequence[str]) -> str:
    """Returns the first release that knows the whole line; the one that knows most of it if none does."""
    unknown: dict[str, int] = {}
    for release in RELEASES:
        try:
            unknown[release] = len(_parsed(own, release)[1])
        except InputError:  # a value that only another release takes
            unknown[release] = len(own)
    return min(RELEASES, key=unknown.__getitem__)


def _without_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns what starts open_clip_train, if it is given, and its own arguments."""
    for place, text in enumerate(arguments):
        if text.endswith(_PROGRAMS):
            return list(arguments[:place]), list(arguments[place + 1 :])
    return [], list(arguments)


def _told(before: Sequence[str], options: Collection[str]) -> int | None:
    """Returns the number that torchrun is told by one of these options; None if it is not."""
    words = [word for text in before for word in text.split("=", 1)]
    numbers = [int(value) for name, value in pairwise(words) if name in options and value.isdecimal()]
    return numbers[-1] if numbers else None


def _unknown(text: str, release: str) -> str:
    name = text.split("=", 1)[0]
    begin = f"{name} is no flag of open_clip_train {release}"
    if name in FLAGS:
        return f"{begin}; only {FLAGS[name].release} has it"
    nearest = near(name.replace("_", "-"), (flag.name for flag in flags_of(release)), most=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "docs/from-open-clip.md lists them"
    return f"{begin}; {hint}"
