"""Prints what a command found, for people and for programs. Imports no torch."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import click

from trainer.safe_io.atomic import json_text
from trainer.text.fitting import fit_to
from trainer.text.masking import masked_values
from trainer.text.terminal import printable


def print_lines(lines: Iterable[str]) -> None:
    """Print lines, each fitted into the terminal, if stdout is one."""
    for line in lines:
        click.echo(fit_to(sys.stdout, line))


def print_json(values: Mapping[str, Any], *, pretty: bool = False) -> None:
    """Print the values as JSON: secrets are masked, and numbers that JSON lacks become null.

    It is one line of ASCII for programs; `pretty`, for people, has a line for each value.
    """
    text = json_text(masked_values(values), 2 if pretty else None, ascii_only=not pretty)
    click.echo(printable(text))
