"""Table of object storage: how addresses begin, what opens them, and what `[data.storage]` means there.

A new kind of store is a row. Pure; opens nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Option:
    """An option of the package that opens the addresses."""

    name: str
    """Its name; a dot leads into a dictionary of options."""
    value: Callable[[Any], Any] = lambda given: given
    """Function from the value of the job file's key to the option's."""


@dataclass(frozen=True)
class StoreRow:
    """Facts about one kind of object storage."""

    name: str
    """Name in messages and in docs/data.md."""
    protocols: tuple[str, ...]
    """Words before `://` with which its addresses begin; fsspec knows the package by each of them."""
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

    @property
    def addresses(self) -> str:
        """Beginnings of its addresses, for a message."""
        return ", ".join(f"{protocol}://" for protocol in self.protocols)


STORES = (
    StoreRow(
        name="S3",
        protocols=("s3",),
        package="s3fs",
        extra="s3",
        options={
            "endpoint": Option("endpoint_url"),
            "region": Option("client_kwargs.region_name"),
            "anonymous": Option("anon"),
            "requester_pays": Option("requester_pays"),
            "ca_bundle": Option("client_kwargs.verify"),
        },
        keys="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the role of the machine or pod",
    ),
    StoreRow(
        name="Google Cloud Storage",
        protocols=("gs", "gcs"),
        package="gcsfs",
        extra="gcs",
        options={
            "endpoint": Option("endpoint_url"),
            "anonymous": Option("token", lambda _: "anon"),
            "requester_pays": Option("requester_pays"),
        },
        keys="GOOGLE_APPLICATION_CREDENTIALS, or the service account of the machine or pod",
    ),
    StoreRow(
        name="Alibaba Cloud OSS",
        protocols=("oss",),
        package="ossfs",
        extra="oss",
        options={"endpoint": Option("endpoint"), "anonymous": Option("key", lambda _: None)},
        keys="OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET, with OSS_SESSION_TOKEN for temporary ones",
        from_variables={
            "key": "OSS_ACCESS_KEY_ID",
            "secret": "OSS_ACCESS_KEY_SECRET",
            "token": "OSS_SESSION_TOKEN",
        },
    ),
    StoreRow(
        name="Azure Blob Storage",
        protocols=("az", "abfs"),
        package="adlfs",
        extra="azure",
        options={
            "endpoint": Option("account_host", lambda address: urlsplit(address).netloc),
            "anonymous": Option("anon"),
        },
        keys="AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or the "
        "identity of the machine or pod",
    ),
)
"""Rows in the order of docs/data.md. The first one takes the keys where a job names no address."""


def store_of(address: str) -> StoreRow | None:
    """Returns the row of an address; None for a path, a stream or another kind of address."""
    protocol = address.partition("://")[0] if "://" in address else ""
    return next((row for row in STORES if protocol in row.protocols), None)


def stores_of(addresses: Iterable[str]) -> dict[str, StoreRow]:
    """Returns the rows that the addresses need, by the first address of each row's package."""
    found: dict[str, tuple[str, StoreRow]] = {}
    for address in addresses:
        if row := store_of(address):
            found.setdefault(row.package, (address, row))
    return dict(found.values())
