"""Says what a call refuses, for tests in which it refuses nothing."""

from collections.abc import Callable
from typing import Any

from trainer.errors import ClusterError, InputError


def refusal(call: Callable[..., object], *arguments: Any, **keys: Any) -> str:
    """The message of the call's InputError or ClusterError; "" if it takes what it is given."""
    try:
        call(*arguments, **keys)
    except (InputError, ClusterError) as error:
        return str(error) or repr(error)
    return ""
