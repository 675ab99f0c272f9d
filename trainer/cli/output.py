"""Prints what a command found, for people and for programs. Imports no torch."""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import click

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
    style: dict[str, Any] = {"indent": 2, "ensure_ascii": False} if pretty else {}
    click.echo(printable(json.dumps(_finite(masked_values(values)), allow_nan=False, **style)))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
