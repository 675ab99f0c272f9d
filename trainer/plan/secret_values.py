"""Warns of values in a job that look like secrets and would be stored where others can read them.

The warnings name keys and show no values. Imports no torch.
"""

from collections.abc import Iterator, Mapping
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


def secrets(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the keys of a dumped job whose values look like secrets, each with the reason."""
    return _secrets("", table)


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


def _secrets(key: str, value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the keys below this one whose values look like secrets, each with the reason.

    `name` is the name that tells the meaning of the value.
    """
    if isinstance(value, Mapping):
        # a variable of a pod, in [kubernetes.patch]
        named = str(value["name"]) if {"name", "value"} <= value.keys() else ""
        for inner, part in value.items():
            yield from _secrets(
                f"{key}.{inner}" if key else inner, part, named if inner == "value" else inner
            )
    elif isinstance(value, list | tuple):
        yield from dict.fromkeys(secret for item in value for secret in _secrets(key, item, name))
    elif isinstance(value, str) and (why := looks_secret(name, value)):
        yield key, why
