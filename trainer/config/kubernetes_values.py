"""Short texts in `[kubernetes]` (mounts, tolerations, references) and the names that Kubernetes allows.

Pure; imports no torch.
"""

import re
from dataclasses import dataclass
from typing import Literal

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

_MOUNT = re.compile(r"(?P<kind>pvc|host|nfs):(?P<rest>[^\x00-\x1f]+?)(?P<ro>:ro)?")
_TOLERATION = re.compile(
    r"(?P<key>[^=:]+)(=(?P<value>[^:]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
_REFERENCE = re.compile(r"(?P<kind>secret|configmap):(?P<name>[^:]+)(:(?P<key>[^:]+))?")

MOUNT_FORMS = (
    "pvc:CLAIM, pvc:CLAIM/FOLDER, host:/FOLDER or nfs:SERVER:/FOLDER, with :ro at the end for read-only"
)
TOLERATION_FORMS = (
    "KEY, KEY:EFFECT, KEY=VALUE or KEY=VALUE:EFFECT; the effect is NoSchedule, PreferNoSchedule or NoExecute"
)


@dataclass(frozen=True)
class Mount:
    """A volume that every pod of the job sees at `path`."""

    path: str
    kind: Literal["pvc", "host", "nfs"]
    source: str
    """Claim, folder of the node, or folder of the server."""
    server: str
    """Server of kind nfs; "" for the others."""
    sub_path: str
    """Folder within the claim, "" for the whole claim."""
    read_only: bool


@dataclass(frozen=True)
class Toleration:
    """A taint that pods tolerate; `value` None means any value, `effect` None any effect."""

    key: str
    value: str | None
    effect: str | None


@dataclass(frozen=True)
class Reference:
    """A Secret or ConfigMap, or one key of it; `key` is None for the whole."""

    kind: Literal["secret", "configmap"]
    name: str
    key: str | None


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
    kind, rest, read_only = match["kind"], match["rest"], match["ro"] is not None
    if kind == "pvc":
        claim, _, folder = rest.partition("/")
        if not DNS_SUBDOMAIN.fullmatch(claim) or (folder and folder != _plain_path(folder)):
            raise ValueError(f'"{text}" does not name a claim: write pvc:CLAIM or pvc:CLAIM/FOLDER')
        return Mount(path, "pvc", claim, "", folder, read_only)
    server, _, folder = rest.rpartition(":") if kind == "nfs" else ("", "", rest)
    if not folder.startswith("/") or ".." in folder.split("/") or (kind == "nfs" and not server):
        raise ValueError(f'"{text}" is not a volume for {path}: write {MOUNT_FORMS}')
    return Mount(path, "nfs" if kind == "nfs" else "host", folder, server, "", read_only)


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


def parse_reference(text: str, *, with_key: bool) -> Reference:
    """Read a reference such as `secret:wandb:api-key`, or `configmap:site` without a key.

    Raises ValueError that says what is allowed.
    """
    match = _REFERENCE.fullmatch(text)
    form = "secret:NAME:KEY or configmap:NAME:KEY" if with_key else "secret:NAME or configmap:NAME"
    if match is None or not DNS_SUBDOMAIN.fullmatch(match["name"]) or (match["key"] is not None) != with_key:
        raise ValueError(f'"{text}" is not a reference: write {form}')
    if match["key"] is not None and not _DATA_KEY.fullmatch(match["key"]):
        raise ValueError(
            f'"{match["key"]}" is not a key of a Secret or ConfigMap: a key has at most 253 characters of '
            'letters, digits, "-", "_" and "."'
        )
    return Reference("secret" if match["kind"] == "secret" else "configmap", match["name"], match["key"])


def _plain_path(path: str) -> str:
    """Returns the path without `..`, `.` and double slashes, which Kubernetes refuses or readers overlook."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    return ("/" if path.startswith("/") else "") + "/".join(parts)
