"""Short texts in `[kubernetes]` (mounts, tolerations, references) and the names that Kubernetes allows.

Pure; imports no torch.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import parse_qsl

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
DNS_LABEL = re.compile(_LABEL)
"""A DNS label as RFC 1123 defines it."""
DNS_1035_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
DNS_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")
QUALIFIED_NAME = re.compile(
    rf"((?=[^/]{{1,253}}/){_LABEL}(\.{_LABEL})*/)?[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?"
)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_DATA_KEY = re.compile(r"[A-Za-z0-9_.-]{1,253}")

_MOUNT = re.compile(
    r"(?P<kind>pvc|host|nfs|secret|configmap|csi|empty)(:(?P<rest>[^\x00-\x1f]+?))??(?P<ro>:ro)?"
)
_EMPTY = re.compile(r"(?P<medium>memory)?(:?(?P<size>[0-9]+(\.[0-9]+)?[KMGT]i?))?")
_TOLERATION = re.compile(
    r"(?P<key>[^=:]+)(=(?P<value>[^:]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
_REFERENCE = re.compile(r"(?P<kind>secret|configmap):(?P<name>[^:]+):(?P<key>[^:]+)")

MOUNT_FORMS = (
    "pvc:CLAIM, pvc:CLAIM/FOLDER, host:/FOLDER, nfs:SERVER:/FOLDER or csi:DRIVER?NAME=VALUE&NAME=VALUE, with "
    ":ro at the end for read-only; secret:NAME, secret:NAME/KEY, configmap:NAME or configmap:NAME/KEY; or "
    "empty, empty:SIZE, empty:memory or empty:memory:SIZE, with a SIZE such as 20Gi"
)
TOLERATION_FORMS = (
    "KEY, KEY:EFFECT, KEY=VALUE or KEY=VALUE:EFFECT; the effect is NoSchedule, PreferNoSchedule or NoExecute"
)


@dataclass(frozen=True)
class Mount:
    """A volume that every pod of the job has at `path`."""

    path: str
    kind: str
    """One of the words before the colon in `MOUNT_FORMS`."""
    source: str = ""
    """Claim, folder of the node or of the server, Secret, ConfigMap, or driver."""
    server: str = ""
    """Server of kind nfs; "" for the others."""
    sub_path: str = ""
    """Folder within the claim, or key of the Secret or ConfigMap; "" for the whole."""
    read_only: bool = False
    attributes: tuple[tuple[str, str], ...] = ()
    """Attributes that the driver of kind csi gets."""
    medium: str = ""
    """"Memory" for kind empty in memory, which counts as the pod's."""
    size: str = ""
    """Limit of kind empty, as Kubernetes writes it; "" for none."""

    @property
    def is_shared(self) -> bool:
        """True if all pods may see the same files there, and others after them."""
        return self.kind in ("pvc", "host", "nfs", "csi")


@dataclass(frozen=True)
class Toleration:
    """A taint that pods tolerate; `value` None means any value, `effect` None any effect."""

    key: str
    value: str | None
    effect: str | None


@dataclass(frozen=True)
class Reference:
    """One key of a Secret or ConfigMap."""

    kind: Literal["secret", "configmap"]
    name: str
    key: str


def parse_mount(path: str, text: str) -> Mount:
    """Read a mount such as `pvc:clip-data/cc3m:ro`. Raises ValueError that says what is allowed."""
    match = _MOUNT.fullmatch(text)
    if match is None:
        raise ValueError(f'"{text}" is not a volume for {path}: write {MOUNT_FORMS}')
    if not path.startswith("/") or path != _plain_path(path) or ":" in path or path == "/":
        raise ValueError(
            f'"{path}" is not a mount path: give an absolute path without "..", "//" and ":", and without '
            "a slash at its end"
        )
    mount = _PARSERS[match["kind"]](path, match["rest"] or "")
    if mount is None:
        raise ValueError(f'"{text}" is not a volume for {path}: write {MOUNT_FORMS}')
    return replace(mount, read_only=True) if match["ro"] else mount


def _claim(path: str, rest: str) -> Mount | None:
    claim, _, folder = rest.partition("/")
    if not DNS_SUBDOMAIN.fullmatch(claim) or (folder and folder != _plain_path(folder)):
        return None
    return Mount(path, "pvc", claim, sub_path=folder)


def _host(path: str, rest: str) -> Mount | None:
    return Mount(path, "host", rest) if _is_folder(rest) else None


def _nfs(path: str, rest: str) -> Mount | None:
    server, _, folder = rest.rpartition(":")
    return Mount(path, "nfs", folder, server=server) if server and _is_folder(folder) else None


def _keys(kind: str) -> "_Parser":
    def parse(path: str, rest: str) -> Mount | None:
        name, slash, key = rest.partition("/")
        if not DNS_SUBDOMAIN.fullmatch(name) or (slash and not _DATA_KEY.fullmatch(key)):
            return None
        return Mount(path, kind, name, sub_path=key, read_only=True)

    return parse


def _csi(path: str, rest: str) -> Mount | None:
    driver, mark, query = rest.partition("?")
    if not DNS_SUBDOMAIN.fullmatch(driver):
        return None
    try:
        attributes = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if mark else []
    except ValueError:
        return None
    return Mount(path, "csi", driver, attributes=tuple(attributes))


def _empty(path: str, rest: str) -> Mount | None:
    match = _EMPTY.fullmatch(rest)
    if match is None:
        return None
    return Mount(path, "empty", medium="Memory" if match["medium"] else "", size=match["size"] or "")


_Parser = Callable[[str, str], Mount | None]
_PARSERS: dict[str, _Parser] = {
    "pvc": _claim,
    "host": _host,
    "nfs": _nfs,
    "secret": _keys("secret"),
    "configmap": _keys("configmap"),
    "csi": _csi,
    "empty": _empty,
}
"""Functions from the mount path and the text after the kind to the mount; None for a text of another form."""


def _is_folder(path: str) -> bool:
    return path.startswith("/") and ".." not in path.split("/")


def parse_toleration(text: str) -> Toleration:
    """Read a toleration such as `dedicated=clip:NoSchedule`; "*" tolerates every taint.

    Raises ValueError that says what is allowed.
    """
    match = _TOLERATION.fullmatch(text)
    if match is None or (match["key"] != "*" and not QUALIFIED_NAME.fullmatch(match["key"])):
        raise ValueError(f'"{text}" is not a toleration: write {TOLERATION_FORMS}')
    if match["value"] is not None and (match["key"] == "*" or not LABEL_VALUE.fullmatch(match["value"])):
        raise ValueError(
            f'"{text}" is not a toleration: a value has at most 63 characters of letters, digits, "-", "_" '
            'and ".", and "*" takes no value'
        )
    return Toleration("" if match["key"] == "*" else match["key"], match["value"], match["effect"])


def parse_reference(text: str) -> Reference:
    """Read a reference such as `secret:wandb:api-key`. Raises ValueError that says what is allowed."""
    match = _REFERENCE.fullmatch(text)
    if match is None or not DNS_SUBDOMAIN.fullmatch(match["name"]):
        raise ValueError(f'"{text}" is not a reference: write secret:NAME:KEY or configmap:NAME:KEY')
    if not _DATA_KEY.fullmatch(match["key"]):
        raise ValueError(
            f'"{match["key"]}" is not a key of a Secret or ConfigMap: a key has at most 253 characters of '
            'letters, digits, "-", "_" and "."'
        )
    return Reference("secret" if match["kind"] == "secret" else "configmap", match["name"], match["key"])


def _plain_path(path: str) -> str:
    """Returns the path without `..`, `.` and double slashes, which Kubernetes refuses or readers overlook."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    return ("/" if path.startswith("/") else "") + "/".join(parts)
