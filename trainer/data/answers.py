"""Tells what an error of a store means: a file that is absent, access denied, a time to wait. Pure.

Each client has errors of its own, which are told apart by what they carry, so that none is imported.
"""

import email.utils
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from trainer.config.stores import store_of

Purpose = Literal["read", "write"]
"""Purpose for which a store is asked."""
MOST_WAIT_S = 30.0
"""Longest wait that a store may ask for: a rank that waits for its data has a limit, too."""
_NO_KEYS = frozenset(
    {
        *("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "NoAuthTokenError"),
        *("DefaultCredentialsError", "RefreshError", "ClientAuthenticationError"),
    }
)
"""Errors of clients that have found no usable keys, and have not asked the store."""
_DENIED = (401, 403)


def is_absent(error: Exception) -> bool:
    """Returns whether the error means that the file does not exist.

    fsspec raises FileNotFoundError for every file that a web server does not give, whatever the reason: only
    404 means it.
    """
    return isinstance(error, FileNotFoundError) and (error.__cause__ is None or _status(error) == 404)


def is_beyond_end(error: Exception) -> bool:
    """Returns whether the error means that the file ends before the part that was asked for."""
    return _status(error) == 416


def is_denied(path: str, error: Exception) -> bool:
    """Returns whether the store of an address refuses to answer because of the keys, or for want of them."""
    if "://" not in path:
        return False
    return (
        isinstance(error, PermissionError)
        or _status(error) in _DENIED
        or str(error).startswith("Forbidden")  # gcsfs tells 403 by its text alone
        or any(type(each).__name__ in _NO_KEYS for each in _with_cause(error))
    )


def denied_text(path: str, error: Exception, purpose: Purpose = "read") -> str:
    """Returns what is wrong with an address whose store denies access, and what to do."""
    row = store_of(path)
    told = " ".join(str(error).split())[:200]
    if row is None:
        return (
            f"{path}: the server denies access ({told}): it wants an address that is signed, or another user"
        )
    public = "; a public bucket wants data.storage.anonymous = true" if purpose == "read" else ""
    return (
        f"{path}: {row.name} denies access ({told}): give the ranks keys that may {purpose} it "
        f"({row.keys}){public}"
    )


def asked_wait_s(error: Exception) -> float:
    """Returns the seconds to wait before the next request that a store asks for (Retry-After), else 0."""
    for each in _with_cause(error):
        headers = getattr(each, "headers", None) or _of_botocore(each).get("HTTPHeaders")
        if isinstance(headers, Mapping):
            for name, value in headers.items():
                if str(name).lower() == "retry-after":
                    return min(max(0.0, _seconds(str(value))), MOST_WAIT_S)
    return 0.0


def _seconds(text: str) -> float:
    """Returns the seconds of a header, which may be a date; 0 if it is neither (RFC 9110, 10.2.3)."""
    try:
        seconds = float(text)
        return seconds if math.isfinite(seconds) else 0.0
    except ValueError:
        pass
    try:
        return email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except ValueError:
        return 0.0


def _status(error: Exception) -> int | None:
    """Returns the status of HTTP that an error or its cause carries; None if there is none."""
    for each in _with_cause(error):
        name = next((name for name in ("status", "status_code", "code") if hasattr(each, name)), "")
        status = _of_botocore(each).get("HTTPStatusCode", getattr(each, name, None))
        if isinstance(status, int):
            return status
    return None


def _of_botocore(error: BaseException) -> Mapping[str, Any]:
    response = getattr(error, "response", None)
    found = response.get("ResponseMetadata") if isinstance(response, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _with_cause(error: BaseException) -> Iterator[BaseException]:
    yield error
    if error.__cause__ is not None:
        yield error.__cause__
