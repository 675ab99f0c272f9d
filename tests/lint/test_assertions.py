"""Every test says what it expects: it asserts, or calls a helper of the tests that does."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.pages import ROOT

TESTS = ROOT / "tests"
EXPECTS = frozenset({"raises", "fail", "warns", "golden", "until", "wait_for"})
"""Calls that fail a test by themselves: those of pytest, comparisons, and waits with a limit."""
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


def names_in(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
        elif isinstance(inner, ast.arg):
            yield inner.arg


def expects(every: dict[str, Module], place: Place, seen: set[Place]) -> bool:
    """Returns whether a function or class asserts, or names another of the tests that does."""
    module, name = place
    if place in seen or name not in every[module].made:
        return False
    seen.add(place)
    node = every[module].made[name]
    if any(isinstance(inner, ast.Assert) for inner in ast.walk(node)):
        return True
    names = set(names_in(node))
    if any(found in EXPECTS or found.startswith("assert_") for found in names):
        return True
    return any(expects(every, each, seen) for found in names for each in _places(every, module, found))


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
    return [
        f"{module}.{name}"
        for module, its in every.items()
        if module.rpartition(".")[2].startswith("test_")
        for name in its.made
        if name.startswith("test_") and not expects(every, (module, name), set())
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
