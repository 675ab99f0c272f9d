"""A real cosign signs an image in a real registry, and tells it from one that is not signed.

cosign is the machine's own, else it is built once from its Go module, which takes minutes.
"""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.image.daemon import docker
from tests.cluster.image.images import clipship, write_job
from tests.cluster.image.storage import registry

pytestmark = [pytest.mark.docker, pytest.mark.full, pytest.mark.timeout(1800)]

MODULE = "github.com/sigstore/cosign/v2/cmd/cosign@v2.6.1"
PASSWORD = ("COSIGN_PASSWORD", "a 'password' of $HOME")
COMMIT = "0123456789" * 4
LABELS = f"org.clipship.torch=2.14.1 org.opencontainers.image.revision={COMMIT}"
LIST = json.dumps([["python", "odd", "1.0", "MIT"]])
IMAGE = f"""\
FROM clipship-test-base:bookworm
RUN mkdir -p /opt/clipship/bin && echo '{LIST}' >/list \\
    && printf '#!/bin/sh\\ncat /list\\n' >/opt/clipship/bin/python && chmod +x /opt/clipship/bin/python
LABEL org.opencontainers.image.base.name=debian:12 {LABELS}
"""
"""An image that lists one package, and has labels of ours."""


@pytest.fixture(scope="module")
def cosign() -> Path:
    if found := shutil.which("cosign"):
        return Path(found)
    if (go := shutil.which("go") or shutil.which("/usr/local/go/bin/go")) is None:
        pytest.skip("neither cosign nor Go is installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipship"
    built = cache / f"cosign-{MODULE.rpartition('@')[2]}" / "cosign"
    if not built.exists():
        env = {**os.environ, "GOBIN": str(built.parent), "CGO_ENABLED": "0"}
        subprocess.run([go, "install", "-trimpath", "-ldflags=-s -w", MODULE], env=env, check=True)
    return built


@pytest.fixture(scope="module")
def keys(cosign: Path, docker_folder: Path) -> Path:
    """A folder with a pair of keys, and another pair's."""
    for name in ("ours", "others"):
        words = [str(cosign), "generate-key-pair", f"--output-key-prefix={name}"]
        subprocess.run(words, cwd=docker_folder, env={**os.environ, PASSWORD[0]: PASSWORD[1]}, check=True)
    return docker_folder


@pytest.fixture(scope="module")
def pushed(bookworm: str, docker_folder: Path) -> Iterator[str]:
    """The name with its digest, in a registry on loopback."""
    with registry(docker_folder) as address:
        tag = f"{address}/team/clip:1"
        done = subprocess.run(
            ["docker", "build", f"--tag={tag}", "-"], input=IMAGE, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        job = write_job(docker_folder, tag, bookworm, "debian-12", name="sign.toml")
        told = clipship("image", "push", str(job))
        assert told.returncode == 0, told.stderr
        yield told.stdout.strip()
        docker("rmi", tag)


def statements(cosign: Path, image: str, key: Path, kind: str) -> list[dict[str, Any]]:
    """The statements that a stranger finds with the public key."""
    words = [
        str(cosign),
        "verify-attestation",
        f"--key={key}",
        f"--type={kind}",
        "--insecure-ignore-tlog=true",
        image,
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(base64.b64decode(json.loads(line)["payload"])) for line in done.stdout.splitlines()]


def test_a_stranger_with_the_public_key_finds_signature_origin_and_packages(
    cosign: Path, keys: Path, pushed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{cosign.parent}:{os.environ['PATH']}")
    monkeypatch.setenv(*PASSWORD)
    for _ in range(2):  # the second time replaces what is there
        done = clipship("image", "sign", pushed, f"--key={keys}/ours.key")
        assert done.returncode == 0, done.stderr
        types = ["https://slsa.dev/provenance/v1", "https://cyclonedx.org/bom"]
        assert json.loads(done.stdout) == {"image": pushed, "signed": True, "attached": types}
    public = keys / "ours.pub"
    verify = [str(cosign), "verify", "--insecure-ignore-tlog=true"]
    assert subprocess.run([*verify, f"--key={public}", pushed]).returncode == 0
    assert subprocess.run([*verify, f"--key={keys}/others.pub", pushed]).returncode != 0
    (origin,) = statements(cosign, pushed, public, "slsaprovenance1")
    made = origin["predicate"]["buildDefinition"]
    assert made["externalParameters"]["torch"] == "2.14.1"
    assert made["resolvedDependencies"][1]["digest"] == {"gitCommit": COMMIT}
    assert origin["subject"][0]["digest"] == {"sha256": pushed.rpartition(":")[2]}
    (packages,) = statements(cosign, pushed, public, "cyclonedx")
    assert [part["name"] for part in packages["predicate"]["components"]] == ["odd"]


def test_a_wrong_password_and_a_missing_key_say_so(
    cosign: Path, keys: Path, pushed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{cosign.parent}:{os.environ['PATH']}")
    for key, password in (("ours.key", "another"), ("none.key", PASSWORD[1])):
        monkeypatch.setenv(PASSWORD[0], password)
        done = clipship("image", "sign", pushed, f"--key={keys}/{key}")
        assert done.returncode == 1
        assert "cosign public-key ended with exit code 1; it says why above" in done.stderr
        assert "Traceback" not in done.stderr
