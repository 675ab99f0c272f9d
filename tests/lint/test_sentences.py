"""Messages of several sentences, and the text of --help, end with a period."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.support.pages import ROOT
from trainer.cli.commands import COMMANDS
from trainer.cli.main import cli

SPEAKING = frozenset(
    (
        *("InputError", "MachineError", "ClusterError", "StorageError", "ValueError", "NonFinite"),
        *("say", "print", "echo", "info", "warning", "error"),
    )
)
"""Functions and exceptions whose first argument people read."""
SEVERAL = re.compile(r"[a-z)}]\. [A-Z`{]")


def text_of(node: ast.expr) -> str:
    """Returns the text with {} for each value; "" if it is no text."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def unended(path: Path) -> list[int]:
    """Lines of messages that have several sentences and no period behind the last one."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in SPEAKING
        and node.args
        and SEVERAL.search(text := text_of(node.args[0]))
        and not text.endswith((".", "{}", "?", ":"))
    ]


def commands(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command, parent=parent)
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            assert below is not None
            yield from commands(below, f"{name} {each}", context)


def test_a_message_of_several_sentences_ends_with_a_period() -> None:
    files = [path for folder in ("trainer", "tools") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    assert {str(path.relative_to(ROOT)): lines for path in files if (lines := unended(path))} == {}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('raise InputError(f"{name} is bad. Use another")', 1),
        ('raise InputError(f"{name} is bad. Use another.")', 0),
        ('say("it is bad: use another")', 0),
    ],
)
def test_a_missing_period_is_found(tmp_path: Path, line: str, found: int) -> None:
    file = tmp_path / "messages.py"
    file.write_text(line)
    assert len(unended(file)) == found


def test_the_help_of_each_command_and_option_ends_with_a_period() -> None:
    every = dict(commands(cli, "clipship"))
    assert len(every) > 30
    texts = {name: (command.help or "").strip() for name, command in every.items()}
    for name, command in every.items():
        options = (option for option in command.params if isinstance(option, click.Option) and option.help)
        texts |= {f"{name} {option.opts[0]}": (option.help or "").strip() for option in options}
    texts |= {f"line of {name}": line for name, line in COMMANDS.items()}
    assert [name for name, text in texts.items() if not text.endswith((".", "]"))] == []
