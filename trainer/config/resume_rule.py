"""Decides which changes a resumed run may make, and which would make it another run.

Pure; imports no torch.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from trainer.config.job import Job
from trainer.config.keys import may_change, walk
from trainer.text.masking import masked_values

LENGTH = frozenset({"optim.steps", "optim.epochs", "optim.decay_from_step", "optim.decay_from_lr"})
"""Keys of a run's length, and of the decay to a nearer end."""


@cache
def may_change_keys() -> frozenset[str]:
    """Returns the sections and keys, such as `data.workers`, that a resumed run may change.

    The number of ranks is no key and may change too.
    """
    return frozenset(".".join(key) for key, field in walk(Job) if may_change(field))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields `key is old there and new here` for each key that matters and differs, in the order of `now`.

    Both arguments are dumped jobs. The length matters unless `now` has `checkpoint.longer` or `shorter`.
    """
    has_new_length = now["checkpoint"]["longer"] or now["checkpoint"]["shorter"]
    free = may_change_keys() | (LENGTH if has_new_length else frozenset())
    return _differences(before, now, free, "")


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], free: frozenset[str], section: str
) -> Iterator[str]:
    for key, new in now.items():
        name = f"{section}{key}"
        old = before.get(key)
        if name in free:
            continue
        if isinstance(new, Mapping):
            yield from _differences(old if isinstance(old, Mapping) else {}, new, free, f"{name}.")
        elif _plain(old) != _plain(new):
            yield f"{name} is {_shown(old)} there and {_shown(new)} here"


def _plain(value: object) -> object:
    """Returns the value as a record has it: JSON turns tuples into lists, and secrets are masked.

    So a URL that was signed again counts as the same one.
    """
    return masked_values(value)


def _shown(value: object) -> str:
    return "not set" if value is None else str(_plain(value))
