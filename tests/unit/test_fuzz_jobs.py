"""Job files of every kind: each gets an answer or a refusal in words from `check` and `render`, never a traceback, never a hang."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE
from trainer.job import Job
from trainer.launch.cli import main
from trainer.launch.presets import preset_names, preset_text
from trainer.launch.render import KINDS

BASE = {
    ("name",): "fuzz",
    ("data", "format"): "synthetic",
    ("data", "synthetic_samples"): 64,
    ("optim", "global_batch_size"): 16,
    ("optim", "steps"): 2,
    ("optim", "lr"): 1e-3,
}
HOSTILE = [
    "",
    " ",
    "'",
    '"',
    "$(false)",
    "`false`",
    "a\nb",
    "\x00",
    "\\",
    "#",
    "%j",
    "é" * 300,
    "-",
    "--",
    "../..",
    "/",
    "{0..9}",
    "[x",
    "pipe:",
]
WORDS = ["auto", "none", "4G", "1-00:00:00", "90", "UNLIMITED", "10Gi", "500m", "debian:12", "2.6.0", "8.0", "RN50", "node1", "a=b,c", "~"]
NUMBERS = [0, 1, 2, 8, -1, 4096, 10**9, 2**63 - 1, 0.0, 0.5, 1.0, -0.1, 1e-320, 1e308, math.inf, math.nan]


def leaves(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Each key of the job file, and the values that its type or default names."""
    for name, field in model.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if inner:
            yield from leaves(inner[0], (*path, name))
        default = field.get_default(call_default_factory=True)
        named = [value for kind in (field.annotation, *get_args(field.annotation)) for value in get_args(kind) if isinstance(value, str)]
        yield (*path, name), [*([default] if isinstance(default, (bool, int, float, str)) else []), *named]


LEAVES = list(leaves(Job))
text = st.one_of(st.sampled_from(HOSTILE), st.sampled_from(WORDS), st.text(max_size=8).filter(lambda value: "://" not in value))
scalars = st.one_of(text, st.sampled_from(NUMBERS), st.integers(-3, 300), st.floats(), st.booleans())
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=4)


@st.composite
def changes(draw: st.DrawFn) -> dict[tuple[str, ...], Any]:
    """Few of them often leave a job that can run, many seldom."""
    found = {}
    for path, named in draw(st.lists(st.sampled_from(LEAVES), max_size=draw(st.sampled_from([2, 6])))):
        found[path] = draw(st.sampled_from(named)) if named and draw(st.integers(0, 5)) else draw(values)
    return found


def toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float() | int():
            return str(value)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{', '.join(map(toml, value))}]"
    return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)} = {toml(its)}" for key, its in value.items()) + "}"


def job_text(changed: dict[tuple[str, ...], Any]) -> str:
    return "".join(f"{'.'.join(path)} = {toml(value)}\n" for path, value in (BASE | changed).items())


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """A preset with a piece cut out and another put in; or bytes of no meaning."""
    whole = preset_text(draw(st.sampled_from(preset_names()))).encode()
    at, length = draw(st.integers(0, len(whole))), draw(st.integers(0, 40))
    return draw(st.one_of(st.just(whole[:at] + draw(st.binary(max_size=6)) + whole[at + length :]), st.binary(max_size=60)))


TEXTS = changes().map(job_text)
FILES = st.one_of(TEXTS.map(str.encode), TEXTS.map(str.encode), spoiled())


@pytest.mark.parametrize("examples", [200, pytest.param(10_000, marks=pytest.mark.full)])
def test_any_job_file_gets_an_answer_or_a_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str], examples: int) -> None:
    path = tmp_path / "job.toml"
    checked = {EXIT_DONE: 0, EXIT_BAD_INPUT: 0}

    @settings(max_examples=examples, deadline=30_000, suppress_health_check=list(HealthCheck), database=None)
    @given(FILES)
    def try_one(content: bytes) -> None:
        path.write_bytes(content)
        for command in (["check"], *(["render", kind] for kind in KINDS)):
            code = main([*command, str(path)])
            said = capsys.readouterr()
            assert code in checked, said
            assert (said.err if code else said.out).strip(), command
            if command == ["check"]:
                checked[code] += 1

    try_one()
    assert min(checked.values()) > examples / 100, "the generator makes both kinds"
