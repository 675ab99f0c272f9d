"""Warns of values in a job that look like secrets and would be stored where others can read them.

The warnings name keys and show no values. Imports no torch.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from trainer.config import Job
from trainer.config.schedulers import SCHEDULERS
from trainer.run.layout import JOB_FILE
from trainer.text.masking import looks_secret


def secret_warnings(job: Job) -> Iterator[str]:
    """Yields a sentence for each key whose value looks like a secret.

    It says why, where the value would be stored, and what to do instead.
    """
    rows = [SCHEDULERS[name] for name in job.schedulers]
    places = [f"{JOB_FILE} of the run folder (mode 0600)", *(row.readers for row in rows)]
    store = next((row.secret for row in rows if row.secret), None)
    for key, why in secrets(job.model_dump(mode="json", exclude_unset=True)):
        name = key.removeprefix("env.") if key.startswith("env.") else None
        yield (
            f"{key} looks like a secret ({why}): its value goes into {', '.join(places)}; "
            f"{_instead(name, store)}"
        )


def secrets(table: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the keys of a dumped job whose values look like secrets, each with the reason."""
    yield from dict.fromkeys(take_secrets(deepcopy(table)))


def take_secrets(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Removes the values of a dumped job that look like secrets; yields their keys, each with the reason.

    A key goes with its whole list if a text in it is one; tables in a list lose keys of their own alone.
    """
    # a variable of a pod, in [kubernetes.patch]
    named = str(table["name"]) if {"name", "value"} <= table.keys() else ""
    for inner, part in list(table.items()):
        key, name = f"{prefix}{inner}", named if inner == "value" else inner
        reasons: list[str] = []
        for item in _items(part):
            if isinstance(item, dict):
                yield from take_secrets(item, f"{key}.")
            elif isinstance(item, str) and (why := looks_secret(name, item)):
                reasons.append(why)
        if reasons:
            del table[inner]
            yield from ((key, why) for why in reasons)


def _items(value: Any) -> Iterator[Any]:
    """Yields the value, or what is in it if it is a list, also one of lists."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _items(item)
    else:
        yield value


def _instead(variable: str | None, store: str | None) -> str:
    """Returns the advice for a variable of [env], or for any other key.

    `store` is the scheduler's own way to a secret.
    """
    name = variable or "NAME"
    way = (
        store.format(name=name)
        if store
        else f"export {name} in the shell that starts the run, from which ranks inherit it"
    )
    if variable:
        return way if store else f"leave it out and {way}"
    return f"a command can name a variable instead, as $NAME: {way}"
