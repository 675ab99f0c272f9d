"""Signing an image: what is refused, what the provenance says, and that it is read back.

`tests/cluster/image/test_sign.py` has a real cosign, and a registry.
"""

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_sbom_documents import CONTENTS, DIGEST
from trainer.errors import ClusterError, InputError
from trainer.image import sign as module
from trainer.image.builder import Stored
from trainer.image.builders import BUILDERS
from trainer.image.sign import provenance, sign

COMMIT = "c0ffee" * 6 + "c0de"
IMAGE = f"registry.example/clip@{DIGEST}"
LABELS = {
    "org.clipship.torch": "2.14.1",
    "org.opencontainers.image.base.name": "debian:12-slim",
    "org.opencontainers.image.base.digest": f"sha256:{'cd' * 32}",
    "org.opencontainers.image.revision": COMMIT,
    "team.example.cost": "7",
}
STAND_IN = """\
#!{python}
import base64, json, pathlib, sys
kept = pathlib.Path({folder!r}, "kept.json")
word, options = sys.argv[1], dict(each.partition("=")[::2] for each in sys.argv[2:])
if word == {fails!r}:
    sys.exit("no such key")
if word == "attest":
    predicate = json.loads(pathlib.Path(options["--predicate"]).read_text())
    subject = [{{"name": "clip", "digest": {{"sha256": {subject!r}}}}}]
    said = {{"subject": subject, "predicateType": "of " + options["--type"], "predicate": predicate}}
    kept.write_text(json.dumps({{"payload": base64.b64encode(json.dumps(said).encode()).decode()}}))
if word == "verify-attestation":
    print("not a statement")
    print(kept.read_text())
with open(pathlib.Path({folder!r}, "words"), "a") as file:
    print(*sys.argv[1:], file=file)
"""


def stored(**labels: str) -> Stored:
    config = {"Labels": {**LABELS, **labels}}
    return Stored(f"sha256:{'ef' * 32}", (IMAGE,), datetime(2026, 5, 1, 9, 30, tzinfo=UTC), config, 1)


@pytest.fixture
def cosign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Puts a stand-in for cosign on PATH, which is otherwise empty; returns what it was asked, so far."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "found", lambda *_: (BUILDERS["podman"], stored()))
    monkeypatch.setattr(module, "contents", lambda *_: CONTENTS)

    def make(fails: str = "", subject: str = DIGEST.removeprefix("sha256:")) -> list[str]:
        program = STAND_IN.format(python=sys.executable, folder=str(tmp_path), fails=fails, subject=subject)
        (tmp_path / "cosign").write_text(program)
        (tmp_path / "cosign").chmod(0o755)
        return (tmp_path / "words").read_text().splitlines() if (tmp_path / "words").exists() else []

    return make


def test_an_image_is_signed_and_described_and_all_is_read_back(cosign: Callable[..., list[str]]) -> None:
    cosign()
    assert sign(IMAGE, "k8s://a/key", "auto") == ["of slsaprovenance1", "of cyclonedx"]
    asked = cosign()
    words = ["public-key", "sign", "verify", "attest", "verify-attestation", "attest", "verify-attestation"]
    assert [line.split()[0] for line in asked] == words
    by_key = [line for line in asked if "--key=k8s://a/key" in line]
    assert [line.split()[0] for line in by_key] == ["public-key", "sign", "attest", "attest"]
    assert all(
        "--tlog-upload=false" in line for line in by_key[1:]
    )  # a name of a company's is no public matter
    assert all(line.endswith(IMAGE) for line in asked[1:])


def test_provenance_says_what_the_labels_say() -> None:
    said = provenance(stored(), "podman")
    made = said["buildDefinition"]
    assert made["externalParameters"] == {"torch": "2.14.1", "revision": COMMIT}
    assert made["resolvedDependencies"] == [
        {"name": "debian:12-slim", "digest": {"sha256": "cd" * 32}},
        {"name": "clipship", "digest": {"gitCommit": COMMIT}},
    ]
    assert said["runDetails"]["builder"]["id"] == "urn:clipship:builder:podman"
    assert said["runDetails"]["metadata"]["finishedOn"] == "2026-05-01T09:30:00Z"


def test_a_checkout_with_changes_has_no_commit_that_could_be_looked_up() -> None:
    labels = {"org.opencontainers.image.revision": f"{COMMIT}+", "org.opencontainers.image.base.digest": ""}
    made: Any = provenance(stored(**labels), "classic")["buildDefinition"]
    assert made["externalParameters"]["revision"] == f"{COMMIT}+"
    assert made["resolvedDependencies"] == [{"name": "debian:12-slim"}, {"name": "clipship"}]


@pytest.mark.parametrize(
    "image",
    ["clip", "clip:1", f"--key=x@{DIGEST}", f"a clip@{DIGEST}", f"clip@{DIGEST}0", f"clip@{DIGEST}\n"],
)
def test_a_name_that_may_come_to_mean_another_image_is_refused(image: str) -> None:
    with pytest.raises(InputError, match="give NAME@sha256:"):
        sign(image, "cosign.key", "auto")


def test_without_cosign_a_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="cosign is not on PATH, and makes signatures: install it"):
        sign(IMAGE, "cosign.key", "auto")


@pytest.mark.parametrize("word", ["public-key", "sign", "verify", "attest", "verify-attestation"])
def test_what_cosign_refuses_ends_there(cosign: Callable[..., list[str]], word: str) -> None:
    cosign(fails=word)
    with pytest.raises(ClusterError, match=f"^cosign {word} ended with exit code 1"):
        sign(IMAGE, "cosign.key", "auto")
    assert word not in [line.split()[0] for line in cosign()]


def test_a_statement_about_another_image_is_not_taken_for_ours(cosign: Callable[..., list[str]]) -> None:
    cosign(subject="0" * 64)
    with pytest.raises(ClusterError, match="does not give back the slsaprovenance1 that was attached"):
        sign(IMAGE, "cosign.key", "auto")


def test_the_predicate_is_json_of_strings_and_maps() -> None:
    assert json.loads(json.dumps(provenance(stored(), "podman"))) == provenance(stored(), "podman")
