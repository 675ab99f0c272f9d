"""Writes the packages of an image as a document that other tools read: CycloneDX or SPDX, both as JSON.

The libraries of both standards make them and check them. The same image gives the same document.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from trainer.errors import ClusterError
from trainer.sysinfo.extras import require
from trainer.sysinfo.versions import installed

_NAMESPACE = UUID("6f2f3c52-5d56-4c5b-9f5b-3a6b8f0f7c11")
"""Namespace of the documents' ids, which follow from the image's digest."""


class Package(NamedTuple):
    """Package of an image."""

    origin: str
    """python or system."""
    name: str
    version: str
    licence: str


@dataclass(frozen=True)
class Contents:
    """The packages of an image, and what the image is."""

    image: str
    digest: str
    """Id of the image, sha256:..."""
    created: datetime
    """When it was built."""
    system: str
    """Word for its system in package addresses, such as debian."""
    packages: tuple[Package, ...]

    @property
    def id(self) -> UUID:
        return uuid5(_NAMESPACE, self.digest)

    def address(self, package: Package) -> str:
        """Returns the package's address (purl)."""
        from packageurl import PackageURL

        kind, namespace = ("pypi", None) if package.origin == "python" else ("deb", self.system)
        return str(PackageURL(kind, namespace, package.name, package.version).to_string())


def cyclonedx(contents: Contents) -> str:
    """Returns a document in CycloneDX 1.6."""
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator
    from packageurl import PackageURL

    bom, licences = Bom(serial_number=contents.id), LicenseFactory()
    bom.metadata.timestamp = contents.created
    bom.metadata.component = Component(
        type=ComponentType.CONTAINER, name=contents.image, version=contents.digest, bom_ref=contents.digest
    )
    bom.metadata.tools.components.add(
        Component(type=ComponentType.APPLICATION, name="clipship", version=installed("clipship"))
    )
    for package in contents.packages:
        address = contents.address(package)
        bom.components.add(
            Component(
                type=ComponentType.LIBRARY,
                name=package.name,
                version=package.version,
                purl=PackageURL.from_string(address),
                bom_ref=address,
                licenses=[licences.make_from_string(package.licence)],
            )
        )
    bom.register_dependency(bom.metadata.component, bom.components)
    text: str = JsonV1Dot6(bom).output_as_string(indent=1)
    if problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ClusterError(f"the CycloneDX document of {contents.image} does not hold its schema: {problem}")
    return text + "\n"


def spdx(contents: Contents) -> str:
    """Returns a document in SPDX 2.3."""
    from spdx_tools.spdx.model import (
        Actor,
        ActorType,
        CreationInfo,
        Document,
        ExternalPackageRef,
        ExternalPackageRefCategory,
        Relationship,
        RelationshipType,
        SpdxNoAssertion,
    )
    from spdx_tools.spdx.model import Package as SpdxPackage
    from spdx_tools.spdx.writer.json.json_writer import write_document_to_file

    def package(number: int, found: Package) -> SpdxPackage:
        declared = _expression(found.licence)
        address = ExternalPackageRef(
            ExternalPackageRefCategory.PACKAGE_MANAGER, "purl", contents.address(found)
        )
        return SpdxPackage(
            spdx_id=f"SPDXRef-package-{number}",
            name=found.name,
            version=found.version,
            download_location=SpdxNoAssertion(),
            files_analyzed=False,
            license_declared=SpdxNoAssertion() if declared is None else declared,
            license_comment=found.licence if declared is None else None,
            external_references=[address],
        )

    image = SpdxPackage(
        "SPDXRef-image", contents.image, SpdxNoAssertion(), version=contents.digest, files_analyzed=False
    )
    document = Document(
        CreationInfo(
            spdx_version="SPDX-2.3",
            spdx_id="SPDXRef-DOCUMENT",
            name=contents.image,
            document_namespace=f"urn:uuid:{contents.id}",
            creators=[Actor(ActorType.TOOL, f"clipship-{installed('clipship')}")],
            created=contents.created,
        ),
        packages=[image, *(package(number, found) for number, found in enumerate(contents.packages, 1))],
        relationships=[
            Relationship("SPDXRef-DOCUMENT", RelationshipType.DESCRIBES, "SPDXRef-image"),
            *(
                Relationship("SPDXRef-image", RelationshipType.CONTAINS, f"SPDXRef-package-{number}")
                for number in range(1, len(contents.packages) + 1)
            ),
        ],
    )
    with TemporaryDirectory() as folder:
        file = Path(folder, "sbom.json")
        write_document_to_file(document, str(file), validate=True)
        return json.dumps(json.loads(file.read_text("utf-8")), indent=1) + "\n"


def _expression(licence: str) -> Any:
    """Returns the licence as an SPDX expression; None if it is none."""
    from license_expression import ExpressionError, get_spdx_licensing

    licensing = get_spdx_licensing()
    try:
        return licensing.parse(licence, validate=True)
    except (ExpressionError, IndexError):  # IndexError: of "()"
        return None


@dataclass(frozen=True)
class Form:
    """A form of the list of packages."""

    write: Callable[[Contents], str]
    needs: tuple[str, ...] = ()
    """Modules that writing it needs."""


def _lines(contents: Contents) -> str:
    return "".join("\t".join(package) + "\n" for package in contents.packages)


FORMS: dict[str, Form] = {
    "lines": Form(_lines),
    "cyclonedx": Form(cyclonedx, ("cyclonedx",)),
    "spdx": Form(spdx, ("spdx_tools",)),
}
"""Forms by the value of --to."""


def written(to: str, contents: Callable[[], Contents]) -> str:
    """Returns the document. Raises InputError before it looks at the image if a package for it is missing."""
    for module in FORMS[to].needs:
        require(module)
    return FORMS[to].write(contents())
