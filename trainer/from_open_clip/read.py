"""Reads a command line of open_clip_train by the table, as its own parser (argparse) would."""

import argparse
import difflib
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from trainer.errors import InputError
from trainer.from_open_clip.data_flags import literal_pairs
from trainer.from_open_clip.line import Line, with_model_defaults
from trainer.from_open_clip.table import FLAGS, VERSION

_PROGRAMS = ("open_clip_train.main", "training.main", "open_clip_train/main.py", "training/main.py")
_RANKS = ("--nproc_per_node", "--nproc-per-node")
_NODES = ("--nnodes",)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"open_clip_train's command line: {message}")


def read(arguments: Sequence[str], gpus: int | None) -> Line:
    """Returns the command line, with open_clip_train's defaults.

    `arguments` may begin with the program itself (torchrun ... -m open_clip_train.main ...); the number of
    ranks that torchrun is told then counts if `gpus` is None. Raises InputError for what
    open_clip_train would refuse.
    """
    before, own = _without_program(arguments)
    own = [text for text in own if text != "--"]  # a shell's wrapper may leave one more
    parser = _Parser(prog="open_clip_train", add_help=False)
    for flag in FLAGS.values():
        parser.add_argument(flag.name, dest=flag.name, **{**flag.takes, "default": argparse.SUPPRESS})
    given, unknown = parser.parse_known_args(own)
    if unknown:
        problems = [_unknown(text) for text in unknown if text.startswith("-")] or [_stray(unknown[0])]
        raise InputError("\n".join(problems))
    named = dict(vars(given))
    if "--aug-cfg" in named:
        named["--aug-cfg"] = literal_pairs(named["--aug-cfg"])
    values: dict[str, Any] = {name: flag.default for name, flag in FLAGS.items()} | named
    for name in ("--batch-size", "--accum-freq"):
        if values[name] < 1:
            raise InputError(f"{name} {values[name]}: must be at least 1")
    nodes = 1 if gpus else _told(before, _NODES) or 1
    here = _told(before, _RANKS)
    ranks = gpus or (here or 1) * nodes
    return Line(with_model_defaults(values), frozenset(named), ranks, nodes)


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


def _unknown(text: str) -> str:
    name = text.split("=", 1)[0]
    near = difflib.get_close_matches(name.replace("_", "-"), list(FLAGS), n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/from-open-clip.md lists them"
    return f"{name} is no flag of open_clip_train {VERSION}; {hint}"


def _stray(text: str) -> str:
    return f"{text} belongs to no flag of open_clip_train {VERSION}"
