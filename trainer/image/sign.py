"""Signs a pushed image with cosign, and attaches what it is made of: its provenance and its packages.

Both are statements of whoever holds the key, about what the image's labels and files say. All three are read
back from the registry, checked with the public key and compared with what was written. Imports no torch.
"""

import base64
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import ClusterError, InputError
from trainer.image.builder import Stored
from trainer.image.builders import found
from trainer.image.sbom_documents import written
from trainer.image.verify import contents
from trainer.sysinfo.versions import installed
from trainer.text.terminal import say

_BY_DIGEST = re.compile(r"[^-@\s][^@\s]*@sha256:[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OURS = "org.clipship."
_BASE, _REVISION = "org.opencontainers.image.base", "org.opencontainers.image.revision"
_LAST_LINES = 5
_NO_LOG, _WITHOUT_LOG = "--tlog-upload=false", "--insecure-ignore-tlog=true"


def sign(image: str, key: str, builder: str) -> list[str]:
    """Sign the image, NAME@sha256:..., in its registry; returns the types of what is attached.

    `key` is a private key as cosign takes it: a file, or an address of a key service. Raises InputError for a
    name without a digest and without cosign, ClusterError if cosign or the registry refuses.
    """
    if not _BY_DIGEST.fullmatch(image):
        raise InputError(
            f'"{image}" may come to mean another image: give NAME@sha256:..., as `clipship image push` '
            "prints it"
        )
    if shutil.which("cosign") is None:
        raise InputError(
            "cosign is not on PATH, and makes signatures: install it from https://docs.sigstore.dev/cosign "
            "(2.6.1 was tried)"
        )
    holder, stored = found(image, builder)
    predicates = {  # by cosign's words for their types
        "slsaprovenance1": provenance(stored, holder.name),
        "cyclonedx": json.loads(written("cyclonedx", lambda: contents(image, holder.name))),
    }
    with tempfile.TemporaryDirectory(prefix="clipship-") as folder:
        public = Path(folder) / "public.pem"
        public.write_text(_cosign("public-key", f"--key={key}"))
        _cosign("sign", "--yes", f"--key={key}", _NO_LOG, image)
        _cosign("verify", f"--key={public}", _WITHOUT_LOG, "--output=json", image)
        return [_attach(kind, predicate, image, key, public) for kind, predicate in predicates.items()]


def provenance(stored: Stored, builder: str) -> dict[str, Any]:
    """Returns the predicate of SLSA's provenance, version 1, out of the labels of the image."""
    labels = stored.labels
    ours = {name.removeprefix(_OURS): value for name, value in labels.items() if name.startswith(_OURS)}
    base = {"name": labels.get(f"{_BASE}.name", "unknown"), **_digest(labels.get(f"{_BASE}.digest", ""))}
    revision = labels.get(_REVISION, "unknown")
    commit = {"digest": {"gitCommit": revision}} if _COMMIT.fullmatch(revision) else {}
    finished = stored.created.isoformat().replace("+00:00", "Z")
    return {
        "buildDefinition": {
            "buildType": "urn:clipship:image:1",
            "externalParameters": {**ours, "revision": revision},
            "internalParameters": {"image": stored.id},
            "resolvedDependencies": [base, {"name": "clipship", **commit}],
        },
        "runDetails": {
            "builder": {
                "id": f"urn:clipship:builder:{builder}",
                "version": {"clipship": installed("clipship")},
            },
            "metadata": {"finishedOn": finished},
        },
    }


def _digest(text: str) -> dict[str, Any]:
    algorithm, _, value = text.partition(":")
    return {"digest": {algorithm: value}} if value else {}


def _attach(kind: str, predicate: Mapping[str, Any], image: str, key: str, public: Path) -> str:
    """Attaches a predicate in place of the last one of its type, and reads it back; returns its full type."""
    file, of_type = public.with_name(f"{kind}.json"), f"--type={kind}"
    file.write_text(json.dumps(predicate))
    words = (of_type, f"--predicate={file}", "--replace=true")
    _cosign("attest", "--yes", f"--key={key}", _NO_LOG, *words, image)
    there = _cosign("verify-attestation", f"--key={public}", _WITHOUT_LOG, of_type, image)
    digest = image.rpartition(":")[2]
    for read in map(_payload, there.splitlines()):
        about = any(subject["digest"] == {"sha256": digest} for subject in read.get("subject", ()))
        if about and read["predicate"] == predicate:
            return str(read["predicateType"])
    raise ClusterError(
        f"{image}: the registry does not give back the {kind} that was attached; "
        "is somebody else signing this image?"
    )


def _payload(line: str) -> dict[str, Any]:
    """Returns the statement in a line of cosign's; empty if there is none."""
    try:
        read: dict[str, Any] = json.loads(base64.b64decode(json.loads(line)["payload"]))
    except (ValueError, KeyError, TypeError):
        return {}
    return read


def _cosign(*words: str) -> str:
    """Runs it on this terminal, on which it may ask for the key's password; returns its stdout.

    A check warns that no log is asked, so its last lines are shown only if it fails.
    """
    checks = words[0].startswith("verify")
    errors = subprocess.PIPE if checks else None
    done = subprocess.run(["cosign", *words], stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode:
        for line in (done.stderr or "").splitlines()[-_LAST_LINES:]:
            say(line)
        raise ClusterError(
            f"cosign {words[0]} ended with exit code {done.returncode}; it says why above. The password of a "
            "key in a file can be in COSIGN_PASSWORD, that of a registry comes by `docker login`."
        )
    return done.stdout
