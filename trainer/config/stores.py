"""Table of object storage: how addresses begin, what opens them, and what `[data.storage]` means there.

The rows are in stores.toml; a new kind of store is a row. Pure; opens nothing else.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from trainer.errors import InputError
from trainer.sysinfo.own_table import own_table


@dataclass(frozen=True)
class Option:
    """An option of the package that opens the addresses."""

    name: str
    """Its name; a dot leads into a dictionary of options."""
    value: Callable[[Any], Any]
    """Function from the value of the job file's key to the option's."""


@dataclass(frozen=True)
class StoreRow:
    """Facts about one kind of object storage."""

    name: str
    """Name in messages and in docs/data.md."""
    protocols: tuple[str, ...]
    """Words before `://` with which its addresses begin; fsspec knows the package by each of them, or gets to
    know it (`client_of`)."""
    package: str
    """Module of fsspec's that opens them."""
    extra: str
    """Extra of the Python package clipship that brings it."""
    options: Mapping[str, Option]
    """Option for each key of `[data.storage]` that the package knows."""
    keys: str
    """Places where the package finds keys, in words for a person."""
    from_variables: Mapping[str, str] = field(default_factory=dict)
    """Options that the package takes from no variable by itself: the variable that each is read from."""
    client_of: str = ""
    """Protocol of another store whose client opens these addresses; "" if fsspec knows them itself."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Keys of `[data.storage]` that a job must set, with an example of each."""

    @property
    def addresses(self) -> str:
        """Beginnings of its addresses, for a message."""
        return ", ".join(f"{protocol}://" for protocol in self.protocols)


_VALUES: dict[str, Callable[[Any], Any]] = {
    "as given": lambda given: given,
    "the word anon": lambda _: "anon",
    "none": lambda _: None,
    "the host of the address": lambda address: urlsplit(address).netloc,
}
"""Functions from a key's value to an option's, by what the table says of the option's value."""


def _row(options: Mapping[str, Sequence[str]], protocols: Sequence[str], **facts: Any) -> StoreRow:
    named = {
        key: Option(name, _VALUES[value[0] if value else "as given"])
        for key, (name, *value) in options.items()
    }
    return StoreRow(protocols=tuple(protocols), options=named, **facts)


STORES = tuple(_row(**row) for row in own_table(__file__, "stores.toml")["stores"])
"""Rows in the order of docs/data.md. The first one takes the keys where a job names no address."""


def store_of(address: str) -> StoreRow | None:
    """Returns the row of an address; None for a path, a stream or another kind of address."""
    protocol = address.partition("://")[0] if "://" in address else ""
    return next((row for row in STORES if protocol in row.protocols), None)


class Address(str):
    """An address, `scheme://...`, that fsspec may open; `of_data` makes one that stands in others' data.

    fsspec also joins file systems to chains (`a::b://`), some of which run code: no address is a chain.
    Raises InputError for one.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> "Address":
        if "::" in text:
            raise InputError(f"{text[:200]} is a chain of file systems (::), which are not opened")
        return super().__new__(cls, text)

    @classmethod
    def of_data(cls, text: str) -> "Address":
        """Takes an address from a table, features or a checkpoint, which may name few protocols.

        fsspec knows others, which read this machine's files or run code. Raises InputError for them.
        """
        if not text.startswith(_OF_DATA):
            raise InputError(f"{text[:200]} is an address of none of {', '.join(_OF_DATA)}")
        return cls(text)


WEB = ("http://", "https://")
"""Beginnings of the addresses of web servers, which take no files."""
_OF_DATA = (*WEB, *(f"{name}://" for row in STORES for name in row.protocols))


def stores_of(addresses: Iterable[str]) -> dict[str, StoreRow]:
    """Returns the rows that the addresses need, by the first address of each."""
    found: dict[str, tuple[str, StoreRow]] = {}
    for address in addresses:
        if row := store_of(address):
            found.setdefault(row.name, (address, row))
    return dict(found.values())
