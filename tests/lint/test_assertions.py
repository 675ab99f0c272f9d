"""Every test says what it expects: it asserts, or calls a helper of the tests that does."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.pages import ROOT

TESTS = ROOT / "tests"
EXPECTS = frozenset({"assert", "raises", "fail", "warns", "golden", "until", "wait_for"})
"""What fails a test: assertions, and calls of pytest, comparisons, and waits with a limit."""
Place = tuple[str, str]
"""Module and name of a function or class."""


class Module:
    """The functions and classes of a file of tests, and what it imports from other files of tests."""

    def __init__(self, tree: ast.Module) -> None:
        self.made = {
            node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        self.imported = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }


def modules(folder: Path) -> dict[str, Module]:
    return {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts): Module(ast.parse(path.read_text()))
        for path in sorted(folder.rglob("*.py"))
    }


def names_in(node: ast.AST) -> frozenset[str]:
    kinds = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg"}
    inside = list(ast.walk(node))
    names = (getattr(inner, kinds[type(inner)]) for inner in inside if type(inner) in kinds)
    return frozenset(names) | {"assert" for inner in inside if isinstance(inner, ast.Assert)}


def expecting(every: dict[str, Module]) -> set[Place]:
    """Returns the functions and classes that assert, or that name others of the tests which do."""
    names = {
        (module, name): names_in(node) for module, its in every.items() for name, node in its.made.items()
    }
    found = {
        place
        for place, own in names.items()
        if any(name in EXPECTS or name.startswith("assert_") for name in own)
    }
    while more := {
        place
        for place in names.keys() - found
        if any(other in found for name in names[place] for other in _places(every, place[0], name))
    }:
        found |= more
    return found


def _places(every: dict[str, Module], module: str, name: str) -> Iterator[Place]:
    yield module, name
    origin = every[module].imported.get(name)
    if origin and origin[0] in every:
        yield origin
    for other in {origin[0] for origin in every[module].imported.values()} & every.keys():
        yield other, name  # a method of a class that is imported


def silent(folder: Path) -> list[str]:
    """Returns the tests of a folder that expect nothing."""
    every = modules(folder)
    found = expecting(every)
    return [
        f"{module}.{name}"
        for module, its in every.items()
        if module.rpartition(".")[2].startswith("test_")
        for name in its.made
        if name.startswith("test_") and (module, name) not in found
    ]


def test_every_test_expects_something() -> None:
    assert silent(TESTS) == []


def test_a_test_that_expects_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "def own(): assert True\n"
        "def test_silent(): int('1')\n"
        "def test_asserts(): assert True\n"
        "def test_by_a_helper(): own()\n"
    )
    assert silent(tmp_path) == [f"{tmp_path.name}.test_a.test_silent"]
