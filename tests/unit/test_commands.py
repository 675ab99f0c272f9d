"""Commands are alike: one module each, whose name is the command's, and one way to print JSON."""

import ast
from importlib import import_module
from pathlib import Path

import click
import pytest

import trainer.cli

FOLDER = Path(trainer.cli.__path__[0])
NO_COMMAND = {
    "__init__", "__main__", "commands", "entry", "main", "options", "output", "suggested",
}  # fmt: skip
"""Modules without a command: where the program begins, and what commands share."""
MODULES = sorted({path.stem for path in FOLDER.glob("*.py")} - NO_COMMAND)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_the_command_line_is_one_command(module: str) -> None:
    found = import_module(f"trainer.cli.{module}")
    assert isinstance(found.command, click.Command)


def calls(path: Path) -> set[str]:
    """The functions that a module calls, as it writes them."""
    return {
        ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    }


@pytest.mark.parametrize("module", MODULES)
def test_a_command_prints_as_all_do(module: str) -> None:
    assert not {"print", "json.dumps", "sys.exit"} & calls(FOLDER / f"{module}.py")
