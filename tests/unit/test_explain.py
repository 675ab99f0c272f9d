"""`clipship explain`: what it says of a key, a section, a name alone and a wrong one."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.command_line import clipship


def keys(schema: dict[str, Any], section: str = "") -> list[str]:
    found = []
    for name, place in schema["properties"].items():
        found += [section + name, *(keys(place, f"{section}{name}.") if "properties" in place else [])]
    return found


@pytest.mark.parametrize("columns", [60, 200, pytest.param(80, marks=pytest.mark.full)])
def test_every_key_and_section_is_explained_within_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for key in ["", *keys(json.loads(clipship("explain", "", "--json").out))]:
        shown = clipship("explain", key)
        assert shown.code == 0, key
        assert max(map(len, shown.out.splitlines())) <= columns, key


def test_key_has_its_type_default_range_unit_and_rule_of_resumed_runs() -> None:
    assert clipship("explain", "recovery.min_nodes").out.splitlines()[-6:] == [
        "",
        "  - whole number, at least 1",
        "  - in nodes",
        "  - default not set",
        "  - a resumed run may change it",
        "  - see also: resources.nodes",
    ]


def test_name_alone_finds_every_key_of_that_name() -> None:
    output = clipship("explain", "batch_size").out
    assert [line for line in output.splitlines() if line and not line.startswith(" ")] == ["eval.batch_size"]


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        *(("optim.learning_rate", ""), ("optim.warmup", "optim.warmup_steps"), ("lrr", "optim.lr")),
        *((".", "`clipship explain` lists the sections"), ("xyzzy", "")),
    ],
)
def test_unknown_key_names_near_ones(wrong: str, near: str) -> None:
    code, _, why = clipship("explain", wrong)
    assert code == 2
    assert f"the job file has no key {wrong}: " in why
    assert near in why


def test_json_is_the_schema_of_the_key() -> None:
    assert json.loads(clipship("explain", "optim.lr", "--json").out)["default"] == 0.0005


def test_it_needs_neither_pydantic_nor_torch() -> None:
    code = (
        "import sys; sys.modules['pydantic'] = sys.modules['torch'] = None\n"
        "from trainer.cli.main import main; sys.exit(main(['explain', 'optim.lr']))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("model.image_size", "  - whole number, at least 1, at most 4,096; or a list of 2 of them"),
        ("eval.class_names", "  - text or a list of them"),
        ("model.image_mean", "  - list of 3; each: number"),
        ("optim.max_batch_size_per_gpu", '  - whole number, at least 1; or one of "auto"'),
    ],
)
def test_types_of_lists_are_said_once(key: str, line: str) -> None:
    assert line in clipship("explain", key).out.splitlines()
