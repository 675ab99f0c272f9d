"""Decides which changes a resumed run may make, and which would make it another run.

Pure; imports no torch.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from trainer.config.job import Job
from trainer.config.keys import may_change, walk
from trainer.config.tables import flat
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
    free = tuple(f"{key}." for key in (*may_change_keys(), *(LENGTH if has_new_length else ())))
    there = dict(flat(before))
    for key, new in flat(now):
        old = there.get(key)
        if not f"{key}.".startswith(free) and _plain(old) != _plain(new):
            yield f"{key} is {_shown(old)} there and {_shown(new)} here"


def _plain(value: object) -> object:
    """Returns the value as a record has it: JSON turns tuples into lists, and secrets are masked.

    So a URL that was signed again counts as the same one.
    """
    return masked_values(value)


def _shown(value: object) -> str:
    return "not set" if value is None else str(_plain(value))
