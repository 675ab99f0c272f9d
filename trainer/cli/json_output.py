"""Prints one JSON object for programs, the only thing on stdout. Imports no torch."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import click

from trainer.text.masking import masked_values


def json_option(says: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns the option --json of a command, which passes it as `as_json`; `says` is its help."""
    return click.option("--json", "as_json", is_flag=True, help=says)


def print_json(values: Mapping[str, Any]) -> None:
    """Print the values as one line of JSON: secrets are masked, and numbers that JSON lacks become null."""
    click.echo(json.dumps(_finite(masked_values(values)), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
