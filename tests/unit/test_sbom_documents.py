"""The packages of an image as CycloneDX and as SPDX: read back with the standards' own libraries."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cyclonedx.model.bom import Bom
from spdx_tools.spdx.model import RelationshipType
from spdx_tools.spdx.parser.parse_anything import parse_file

from trainer.cli.image import _FORMS
from trainer.errors import InputError
from trainer.image.sbom_documents import FORMS, Contents, Package, written

DIGEST = f"sha256:{'ab' * 32}"
PACKAGES = (
    Package("python", "torch", "2.9.1+cu129", "BSD-3-Clause"),
    Package("python", "tqdm", "4.67.1", "MPL-2.0 AND MIT"),
    Package("python", "odd", "1.0", 'its "own" licence, v2'),
    Package("python", "strange", "1.0", "()"),
    Package("system", "libc6", "2.36-9+deb12u13", "GPL-2, LGPL-2.1"),
    Package("system", "zlib1g", "1:1.2.13.dfsg-1", "see /usr/share/doc/zlib1g/copyright"),
)
CONTENTS = Contents(
    "registry.example/clip:1", DIGEST, datetime(2026, 5, 1, 9, 30, tzinfo=UTC), "debian", PACKAGES
)


def document(to: str) -> str:
    return written(to, lambda: CONTENTS)


def test_the_command_knows_every_form() -> None:
    assert tuple(FORMS) == _FORMS


def test_lines_are_the_packages_in_their_order() -> None:
    assert document("lines").splitlines() == ["\t".join(package) for package in PACKAGES]


@pytest.mark.parametrize("to", FORMS)
def test_the_same_image_gives_the_same_document(to: str) -> None:
    assert document(to) == document(to)


def test_cyclonedx_names_each_package_by_its_address_and_licence() -> None:
    bom = Bom.from_json(json.loads(document("cyclonedx")))  # type: ignore[attr-defined]
    found = {part.name: part for part in bom.components}
    assert found.keys() == {package.name for package in PACKAGES}
    assert str(found["torch"].purl) == "pkg:pypi/torch@2.9.1%2Bcu129"
    assert str(found["zlib1g"].purl) == "pkg:deb/debian/zlib1g@1:1.2.13.dfsg-1"
    licences = {name: next(iter(part.licenses)) for name, part in found.items()}
    assert licences["torch"].id == "BSD-3-Clause"
    assert licences["tqdm"].value == "MPL-2.0 AND MIT"
    assert licences["odd"].name == 'its "own" licence, v2'
    image = bom.metadata.component
    assert (image.name, image.version) == (CONTENTS.image, DIGEST)
    assert bom.metadata.timestamp == CONTENTS.created


def test_spdx_has_licences_that_are_expressions_and_the_others_as_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "sbom.spdx.json"
    file.write_text(document("spdx"))
    read = parse_file(str(file))
    found = {part.name: part for part in read.packages}
    assert found.keys() == {CONTENTS.image, *(package.name for package in PACKAGES)}
    assert str(found["tqdm"].license_declared) == "MPL-2.0 AND MIT"
    assert str(found["odd"].license_declared) == "NOASSERTION"
    assert found["odd"].license_comment == 'its "own" licence, v2'
    assert found["strange"].license_comment == "()"
    assert found["libc6"].external_references[0].locator == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13"
    kinds = [each.relationship_type for each in read.relationships]
    assert kinds.count(RelationshipType.CONTAINS) == len(PACKAGES)
    assert found[CONTENTS.image].version == DIGEST


def test_what_is_missing_is_said_before_the_image_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_at() -> Contents:
        raise AssertionError

    monkeypatch.setattr("trainer.sysinfo.extras.find_spec", lambda module: None)
    with pytest.raises(InputError, match=r"clipship\[sbom\]"):
        written("spdx", looked_at)
