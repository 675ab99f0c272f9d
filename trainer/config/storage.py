"""`[data.storage]`: how object storage is reached; never the keys to it. Opens nothing."""

import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import StringConstraints, field_validator, model_validator

from trainer.config.keys import JobPath
from trainer.config.stores import STORES, StoreRow, store_of, stores_of
from trainer.config.types import ONE_LINE, REGION, Section, Text
from trainer.text.masking import is_secret_name, looks_secret, masked, secret_in
from trainer.text.wording import many

_SECRET_KEYS = frozenset({"key", "connection_string"})
"""Names of options that hold a secret, beside those whose words say so."""
_ADDRESS = re.compile(r"https?://[A-Za-z0-9.:_\[\]-]+(?:/[A-Za-z0-9._~/-]*)?")
_WHERE = (
    "ranks take it from their environment or from the role of their machine (for S3 "
    f"{STORES[0].keys}; on Kubernetes from a secret that [kubernetes.env] names)"
)


class Storage(Section):
    """Object storage in which data lie (s3://, gs://, oss://, obs://, az://): its address and how to ask it.

    Keys do not stand here: ranks take them from their environment.
    """

    endpoint: Annotated[str, StringConstraints(pattern=ONE_LINE)] | None = None
    """Address of the storage, http:// or https://, if it is not the provider's own: MinIO, Ceph, R2, a
    private zone. None: what the environment says (AWS_ENDPOINT_URL), else the provider's. One kind of
    storage only: all s3:// addresses of a job lie behind it."""
    region: Annotated[str, StringConstraints(pattern=REGION)] | None = None
    """S3: region of the bucket. None: what the environment says (AWS_DEFAULT_REGION)."""
    anonymous: bool = False
    """Ask without keys, as public buckets allow."""
    requester_pays: bool = False
    """S3 and Google: agree to be billed for what is read, which some buckets ask for."""
    ca_bundle: Annotated[Text, JobPath()] | None = None
    """S3: file of the certificates (PEM) that the endpoint's own is checked against, if no public authority
    has signed it. None: AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE or SSL_CERT_FILE, which the other packages read."""

    @model_validator(mode="before")
    @classmethod
    def _without_keys(cls, given: Any) -> Any:
        for name, value in given.items() if isinstance(given, Mapping) else ():
            unknown = name not in cls.model_fields
            if (unknown and (name in _SECRET_KEYS or is_secret_name(name))) or (
                isinstance(value, str) and looks_secret(name, value)
            ):
                raise ValueError(
                    f"{masked(name)[:40]} looks like a key to the storage, which has no place in a job file: "
                    f"others read it. Leave it out; {_WHERE}"
                )
        return given

    @field_validator("endpoint")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        if value is not None and not _is_address(value):
            raise ValueError(
                "must be the address of a server, such as https://minio.example.org:9000, without name, "
                f"password and query (given {value[:80]!r})"
            )
        return value

    @property
    def given(self) -> dict[str, Any]:
        """The keys that are set, with their values."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name))}


def _is_address(text: str) -> bool:
    try:
        where = urlsplit(text)
        return bool(_ADDRESS.fullmatch(text) and where.hostname and where.port != 0)
    except ValueError:  # a port that is no number
        return False


def addressed(storage: Storage, addresses: tuple[str, ...]) -> tuple[StoreRow, ...]:
    """Returns the rows that the keys are for: those of the addresses, else the first of the table.

    Addresses in the cells of a table are not known before they are read. Raises ValueError for a key that the
    stores do not have, and for a secret in an address.
    """
    found = stores_of(addresses)
    for address in addresses:
        if store_of(address) and secret_in(address):
            raise ValueError(f"{masked(address)}: a key has no place in a job file. Leave it out; {_WHERE}")
    rows = tuple(found.values()) or STORES[:1]
    if "endpoint" in storage.given and len(rows) > 1:
        raise ValueError(
            "data.storage.endpoint is that of one kind of storage, and the job names "
            f"{many(len(rows), 'kind')} ({', '.join(found)}): set the endpoints in the environment instead"
        )
    for row in found.values():
        if missing := [name for name in row.needs if name not in storage.given]:
            raise ValueError(
                f"data.storage.{missing[0]}: {row.name} ({row.addresses}) needs it, such as "
                f'"{row.needs[missing[0]]}"'
            )
    for row in rows:
        if lacking := [name for name in storage.given if name not in row.options]:
            raise ValueError(
                f"data.storage.{lacking[0]}: {row.name} ({row.addresses}) has no such setting in "
                f"{row.package}; it has {', '.join(row.options)}"
            )
    return rows
