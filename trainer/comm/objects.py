"""Encodes small values that ranks exchange as JSON text.

Pickles are never used: reading a stranger's pickle runs its code. JSON has no tuples and allows only strings
as keys, so tuples and mappings are written as marked lists and come back as they were.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_TUPLE, _MAPPING = "tuple", "mapping"


def encode(value: Any) -> Tensor:
    """Returns the value as bytes, uint8 on the CPU.

    Raises TypeError if it is not made of numbers, texts, lists, tuples and mappings.
    """
    return torch.frombuffer(bytearray(json.dumps(_marked(value)).encode()), dtype=torch.uint8)


def decode(message: Tensor) -> Any:
    """Returns the value that `encode` was given. Raises ValueError if the bytes are something else."""
    try:
        return _unmarked(json.loads(message.cpu().numpy().tobytes()))
    except (ValueError, TypeError, KeyError, RecursionError) as problem:
        raise ValueError(
            f"received a message that no rank sends ({type(problem).__name__}): "
            "it is damaged, or another program sent it"
        ) from None


def _marked(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_marked(item) for item in value]}
    if isinstance(value, Mapping):
        return {_MAPPING: [[_marked(key), _marked(item)] for key, item in value.items()]}
    raise TypeError(
        f"a {type(value).__name__} cannot be sent to other ranks: "
        "use numbers, texts, lists, tuples and mappings"
    )


def _unmarked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmarked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_unmarked(item) for item in value[_TUPLE])
    return {_unmarked(key): _unmarked(item) for key, item in value[_MAPPING]}
