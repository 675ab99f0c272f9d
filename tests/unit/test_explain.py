"""`clipship explain`: what it says of a key, a section, a name alone and a wrong one."""

import json
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trainer.cli.explain import command
from trainer.errors import InputError
from trainer.presets.files import SCHEMA


def explain(*arguments: str, columns: str = "80") -> Result:
    return CliRunner(env={"COLUMNS": columns}).invoke(command, arguments)


def keys(schema: dict[str, Any], section: str = "") -> list[str]:
    found = []
    for name, place in schema["properties"].items():
        found += [section + name, *(keys(place, f"{section}{name}.") if "properties" in place else [])]
    return found


@pytest.mark.parametrize("columns", [60, 200, pytest.param(80, marks=pytest.mark.full)])
def test_every_key_and_section_is_explained_within_the_terminal(columns: int) -> None:
    for key in ["", *keys(json.loads(SCHEMA.read_text()))]:
        shown = explain(key, columns=str(columns))
        assert shown.exit_code == 0, key
        assert max(map(len, shown.output.splitlines())) <= columns, key


def test_key_has_its_type_default_range_unit_and_rule_of_resumed_runs() -> None:
    assert explain("recovery.min_nodes").output.splitlines()[-6:] == [
        "",
        "  - whole number, at least 1",
        "  - in nodes",
        "  - default not set",
        "  - a resumed run may change it",
        "  - see also: resources.nodes",
    ]


def test_name_alone_finds_every_key_of_that_name() -> None:
    output = explain("batch_size").output
    assert [line for line in output.splitlines() if line and not line.startswith(" ")] == ["eval.batch_size"]


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        *(("optim.learning_rate", ""), ("optim.warmup", "optim.warmup_steps"), ("lrr", "optim.lr")),
        *((".", "`clipship explain` lists the sections"), ("xyzzy", "")),
    ],
)
def test_unknown_key_names_near_ones(wrong: str, near: str) -> None:
    raised = explain(wrong).exception
    assert isinstance(raised, InputError)
    assert str(raised).startswith(f"the job file has no key {wrong}: ")
    assert near in str(raised)


def test_json_is_the_schema_of_the_key() -> None:
    assert json.loads(explain("optim.lr", "--json").output)["default"] == 0.0005


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
    assert line in explain(key).output.splitlines()
