"""Table of hubs of models: how a name says which one has it.

`trainer.model.hub_clients` has the client of each row, and the variables that the client reads. Pure.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class HubRow:
    """Facts about one hub."""

    prefix: str
    """Beginning of a name that this hub has."""
    title: str
    """Name in messages."""


HUBS = (HubRow("hf:", "the Hugging Face hub"), HubRow("modelscope:", "ModelScope"))
_NAME = re.compile(r"(?P<repository>(?:[\w.-]+/)?[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


def hub_of(name: str) -> HubRow | None:
    """Returns the row of a name on a hub; None for a path, a tag, or a name without a hub's prefix."""
    return next((row for row in HUBS if name.startswith(row.prefix)), None)


def repository_of(name: str) -> tuple[str, str | None]:
    """Returns the repository and the revision of a name, with or without its hub's prefix.

    Raises ValueError for what is no name: parts of it become parts of paths and addresses.
    """
    row = hub_of(name)
    match = _NAME.fullmatch(name.removeprefix(row.prefix if row else ""))
    if match is None or re.search(r"(?:^|[/@])\.+(?:/|@|$)", match[0]):
        prefix = row.prefix if row else ""
        raise ValueError(
            f'"{name}" names no model: write "{prefix}OWNER/NAME" or "{prefix}OWNER/NAME@REVISION"'
        )
    return match["repository"], match["revision"]


def check_hub_name(name: str | None) -> None:
    """Raises ValueError if a name begins as a hub's and names no model."""
    if name is not None and hub_of(name):
        repository_of(name)
