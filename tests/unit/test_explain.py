"""`clipship explain`: what it says of a key, a section, a name alone and a wrong one."""

import json
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
