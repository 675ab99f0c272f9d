"""How commands print what they found, for people and for programs. Imports no torch."""

import json
import math
from collections.abc import Mapping
from typing import Any

import click

from trainer.text.masking import masked_values


def print_json(values: Mapping[str, Any]) -> None:
    """Print the values as one line of JSON: secrets are masked, and numbers that JSON lacks become null."""
    click.echo(json.dumps(_finite(masked_values(values)), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
