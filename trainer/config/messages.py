"""Explains in the user's words what the model refuses: expected, given, what to do. Imports no torch."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from trainer.config.job import Job
from trainer.config.keys import field_at, section_at, walk
from trainer.config.overrides import Override
from trainer.config.toml_lines import Key, Lines
from trainer.config.types import (
    ABSOLUTE_PATH,
    COMPUTE_CAPABILITY,
    NO_NUL,
    ONE_LINE,
    REGION,
    VARIABLE,
    VERSION,
)
from trainer.text.masking import masked
from trainer.text.near import near
from trainer.text.terminal import one_line
from trainer.text.wording import many

_EXPECTED = {
    "string_type": "text in quotes",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list in brackets",
    "model_type": "a section",
}
_OTHERS = {
    "string_too_short": "must not be empty",
    "string_unicode": "has a name that is not UTF-8: rename the file or the folder",
    "finite_number": "must be a finite number",
    "missing": "expected more values",
    "too_long": "expected fewer values",
}
_PATTERNS = {
    NO_NUL: "must not contain a NUL character",
    ONE_LINE: "must be one line without a NUL character",
    VERSION: 'expected a version such as "2.14.1"',
    COMPUTE_CAPABILITY: 'expected a compute capability such as "8.0"',
    ABSOLUTE_PATH: 'expected an absolute path of letters, digits and _.+-, such as "/usr/local/cuda"',
    REGION: 'expected the name of a region, such as "eu-central-1"',
    VARIABLE: "expected the name of a variable: letters, digits and underscores, not beginning with a digit",
}
_ELSEWHERE = {
    "accum_freq": "optim.max_batch_size_per_gpu, above which a rank accumulates",
    "batch_size": "optim.global_batch_size, of all ranks",
    "learning_rate": "optim.lr",
    "nccl_timeout": "[timeouts], which has a limit for each phase",
    "num_workers": "data.workers",
    "val_data": "eval.retrieval",
    "wd": "optim.weight_decay",
}
"""Keys by which others know what a key of ours does."""
_MOST_HINTS = 30
_LONGEST_KEY = 100
_FEW_KEYS = 10
"""Keys of a section that a message lists."""
_LIKELY = 0.4
"""Similarity from which a key may have been meant, if no other is nearer; difflib's own bound is 0.6."""
_MOST_PROBLEMS = 100
_BOUNDS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}


def problem_texts(error: ValidationError) -> list[tuple[Key, str]]:
    """Returns one (key, problem) for each refused key; the empty key stands for the whole job."""
    problems: dict[Key, list[str]] = {}
    for details in error.errors(include_url=False):
        key = _key(details["loc"])
        hint = len(problems) < _MOST_HINTS
        problems.setdefault(key, []).append(_sentence(key, details, hint=hint))
    return [(key, _join(sentences)) for key, sentences in problems.items()]


def _join(sentences: Sequence[str]) -> str:
    """Returns one sentence for a key. A key that takes either of two types is refused once for each type."""
    first, *others = dict.fromkeys(sentences)
    expected = [
        other.removeprefix("expected ").split(" (given")[0]
        for other in others
        if other.startswith("expected ")
    ]
    if expected and first.startswith("expected "):
        first = first.replace(" (given", f" or {' or '.join(expected)} (given", 1)
    return first


def _key(location: tuple[int | str, ...]) -> Key:
    """Returns the location's names as in the file, without list indices and the names of a union's types."""
    names: list[str] = []
    for part in location:
        section = section_at(Job, tuple(names))
        if section is None or not isinstance(part, str):
            break
        names.append(part)
    return tuple(names)


def placed(
    problems: Sequence[tuple[Key, str]], origin: str, lines: Lines, changes: Sequence[Override]
) -> list[str]:
    """Returns the problems in the file's order, each with its place.

    The place is `job.toml:12: optim.lr: ...`, or `--set optim.lr: ...` if an override concerns the key. A
    long list is cut after _MOST_PROBLEMS, with the number of the others.
    """
    placed: list[tuple[int, str]] = []
    for key, problem in problems:
        line = lines.of(key)
        change = next(
            (
                c
                for c in reversed(changes)
                if key[: len(c.key)] == c.key or (key and c.key[: len(key)] == key)
            ),
            None,
        )
        place = f"--set {shown_key(change.key)}" if change else f"{origin}:{line}" if line else origin
        about = "" if not key or (change and change.key == key) else f"{shown_key(key)}: "
        placed.append((line or 0, f"{place}: {about}{problem}"))
    texts = [text for _, text in sorted(placed, key=lambda problem: problem[0])]
    more = [f"and {len(texts) - _MOST_PROBLEMS:,} more problems"] if len(texts) > _MOST_PROBLEMS else []
    return texts[:_MOST_PROBLEMS] + more


def shown_key(key: Key) -> str:
    """Returns the key as a message names it: on one line, shortened."""
    text = one_line(".".join(key))
    return text if len(text) <= _LONGEST_KEY else f"{text[: _LONGEST_KEY - 3]}..."


def _sentence(key: Key, details: Mapping[str, Any], *, hint: bool) -> str:
    """Returns the problem of the key, from pydantic's details of the error.

    With `hint`, it names the nearest existing key, which takes time to find.
    """
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(key) if hint and len(key[-1]) <= _LONGEST_KEY else "unknown key"
    if kind == "missing" and section_at(Job, key[:-1]) and details["loc"] == key:
        return _missing(key)
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return _choice(key, details["input"])
    wanted = _wanted(kind, context)
    return f"{wanted or details['msg']} (given {_given(details['input'])})"


def _wanted(kind: str, context: Mapping[str, Any]) -> str | None:
    """Returns what is allowed, by pydantic's name of the problem; None if pydantic's own text must do."""
    bounds = [
        f"must be {phrase} {context[name]:,.12g}" for name, phrase in _BOUNDS.items() if name in context
    ]
    if bounds:
        return bounds[0]
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}"
    if kind == "string_pattern_mismatch":
        return _PATTERNS[context["pattern"]]
    if kind == "string_too_long":
        return f"must not be longer than {many(context['max_length'], 'character')}"
    return _OTHERS.get(kind)


def _unknown(key: Key) -> str:
    """Returns the message for an unknown key: what may have been meant, and the section's hatch."""
    section, nearest = section_at(Job, key[:-1]), _nearest(key)
    if section is None or not section.hatch:
        return nearest
    name = one_line(key[-1])
    hatch = section.hatch.format(option=name.replace("_", "-"), variable=name.upper())
    return f"{nearest}{'' if nearest.endswith('?') else '.'} {hatch}"


def _nearest(key: Key) -> str:
    """Returns the message for an unknown key with the nearest key of the section, else of any section."""
    if meant := _ELSEWHERE.get(key[-1].lower()):
        return f"unknown key; here it is {meant}"
    section = section_at(Job, key[:-1])
    known = list(section.model_fields) if section else []
    inside = f"[{'.'.join(key[:-1])}]" if key[:-1] else "a job file"
    nearest = near(key[-1], known, most=1) or [name for name in known if sorted(name) == sorted(key[-1])]
    if nearest:
        return f"unknown key; did you mean {'.'.join((*key[:-1], nearest[0]))}?"
    others = [other for other, _ in walk(Job)]
    elsewhere = [other for other in others if other[-1] == key[-1]] or [
        other for other in others if near(key[-1], other[-1:], least=0.8)
    ]
    if elsewhere:
        return f"unknown key; did you mean {'.'.join(elsewhere[0])}?"
    likely = near(key[-1], known, least=_LIKELY)
    if likely and key[:-1] and len(known) > _FEW_KEYS:
        names = ", ".join(".".join((*key[:-1], name)) for name in likely)
        return f"unknown key; the nearest are {names}; `clipship explain {'.'.join(key[:-1])}` lists all"
    return f"unknown key; {inside} has: {', '.join(known)}"


def _missing(key: Key) -> str:
    section = section_at(Job, key)
    if section is None:
        place = f"in section [{'.'.join(key[:-1])}]" if key[:-1] else "at the top of the file"
        return f"missing; it must be given {place}"
    required = [name for name, field in section.model_fields.items() if field.is_required()]
    needs = f" with {', '.join(required)}" if required else ""
    return f"missing; a job needs the section [{'.'.join(key)}]{needs}"


def _choice(key: Key, given: object) -> str:
    choices = [str(choice) for choice in _literals(key)]
    nearest = near(str(given)[:_LONGEST_KEY], choices, most=1)
    hint = f"; did you mean {_given(nearest[0])}?" if nearest else ""
    return f"must be one of {', '.join(map(_given, choices))} (given {_given(given)}){hint}"


def _literals(key: Key) -> list[object]:
    field = field_at(Job, key)
    pending: list[Any] = [field.annotation if field else None]
    literals: list[object] = []
    while pending:
        part = pending.pop(0)
        inner = get_args(part)
        if inner and not isinstance(inner[0], str):
            pending.extend(inner)
        else:
            literals.extend(inner if get_origin(part) else ())
    return literals


def _given(value: object) -> str:
    """Returns the value as a job file shows it, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = masked(value)  # before cutting: half a password would not be recognized
        return f'"{one_line(text)}"' if len(text) <= 60 else f'"{one_line(text[:57])}..."'
    if isinstance(value, datetime.date | datetime.time):
        return f'the bare date or time {value}: write it in quotes, "{value}"'
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_given, value[:4])) + (", ..." if len(value) > 4 else "") + "]"
    return str(value)[:60]
