"""Opens addresses of object storage as the job says: which package, with which options. No torch."""

import json
import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

from trainer.config import Job
from trainer.config.storage import addressed
from trainer.config.stores import WEB, StoreRow, store_of, stores_of
from trainer.errors import InputError

SETTINGS = "CLIPSHIP_STORAGE"
"""Variable in which a rank says to itself and to its loader processes what `[data.storage]` means: options by
protocol, as JSON. It holds no keys."""


def storage_needed(job: Job) -> Iterator[tuple[str, str, str]]:
    """Yields package, what pip installs, and the first of the job's addresses that needs it."""
    for path, row in stores_of(job.addresses).items():
        yield row.package, installed_by(row), path


def installed_by(row: StoreRow) -> str:
    """Returns what pip installs for the package of a store, as a word of a shell."""
    return f"'clipship[{row.extra}]'"


def check_storage(job: Job) -> None:
    """Raises InputError if this machine's ranks lack a package that the data needs."""
    for package, extra, path in storage_needed(job):
        if find_spec(package) is None:
            raise InputError(
                f"{path} needs the package {package}, which is not installed: python -m pip install {extra}"
            )


def storage_rows(job: Job) -> Iterator[tuple[str, str]]:
    """Yields topic and text of a line of `clipship check` for each kind of storage that the job names."""
    told = job.data.storage
    for row in stores_of(job.addresses).values():
        parts = [f"{row.name} through {row.package}", *([f"at {told.endpoint}"] if told.endpoint else [])]
        parts += [f"region {told.region}"] if told.region else []
        parts += ["the reader pays"] if told.requester_pays else []
        yield "storage", f"{', '.join(parts)}; {'without keys' if told.anonymous else f'keys: {row.keys}'}"


def use_storage(job: Job) -> None:
    """Makes this process, and those that it starts, open addresses as `[data.storage]` says."""
    given = job.data.storage.given
    options: dict[str, dict[str, Any]] = {}
    for row in addressed(job.data.storage, job.addresses):
        options.update(dict.fromkeys(row.protocols, _options(row, given)))
    os.environ[SETTINGS] = json.dumps(options)


def _options(row: StoreRow, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of the package for the keys of `[data.storage]` that are set."""
    options: dict[str, Any] = {}
    for key, value in given.items():
        option = row.options[key]
        *outer, name = option.name.split(".")
        inner = options
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[name] = option.value(value)
    return options


def client_options(path: str) -> dict[str, Any]:
    """Returns the options with which fsspec opens an address, keys from the environment among them."""
    row = store_of(path)
    if path.startswith(WEB):
        from trainer.data.web import web_options

        return web_options(path)
    if row is None:
        return {}
    keys = {option: os.environ[name] for option, name in row.from_variables.items() if name in os.environ}
    options = {**keys, **_said(os.environ.get(SETTINGS, "{}")).get(path.partition("://")[0], {})}
    if "ca_bundle" in row.options and not os.environ.get("AWS_CA_BUNDLE") and (file := certificate_file()):
        section, name = row.options["ca_bundle"].name.split(".")
        options[section] = {name: file, **options.get(section, {})}
    return options


def certificate_file() -> str | None:
    """Returns the file of certificates that the environment names."""
    return os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")


@cache
def _said(settings: str) -> dict[str, dict[str, Any]]:
    said: dict[str, dict[str, Any]] = json.loads(settings)
    return said
