"""What a run may change when it goes on, and what would make it another run. Pure; imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

MAY_CHANGE = frozenset(
    {
        # where and how it runs, not what it computes
        "stack", "image", "resources", "slurm", "kubernetes", "env", "timeouts", "health", "logging", "comm", "checkpoint", "eval",
        "data.workers", "data.index", "data.on_bad_sample", "data.max_bad_share",
        "model.cache_dir", "model.offline", "model.channels_last", "model.compile", "model.grad_checkpointing",
        "optim.max_batch_size_per_gpu",
    }
)  # fmt: skip
"""Sections and keys; the number of ranks is in no job file's numbers and may change too."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """`key is old there and new here` for each key that matters and differs, in the order of `now`. Both are dumped jobs."""
    for key, new in now.items():
        name, old = f"{section}{key}", before.get(key)
        if name in MAY_CHANGE:
            continue
        if isinstance(new, Mapping):
            yield from differences(old if isinstance(old, Mapping) else {}, new, f"{name}.")
        elif _plain(old) != _plain(new):
            yield f"{name} is {_shown(old)} there and {_shown(new)} here"


def _plain(value: object) -> object:
    """Tuples come back from JSON as lists."""
    return list(value) if isinstance(value, tuple) else value


def _shown(value: object) -> str:
    return "not set" if value is None else str(_plain(value))
