"""Prints the installed Python and system packages, one a line with tabs between the columns.

`clipship image sbom` runs it in an image.
"""

import importlib.metadata as metadata
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

Package = tuple[str, str, str, str]
"""Origin (python or system), name, version and licence of a package."""

_LONGEST_LICENCE = 60


def installed() -> list[Package]:
    """Returns the installed packages, sorted so that two images can be compared line by line."""
    return sorted({*_python(), *_system()}, key=lambda package: (package[0], package[1].lower(), package[2]))


def _python() -> Iterator[Package]:
    for package in metadata.distributions():
        yield "python", package.name, package.version, _licence(package.metadata)


def _licence(about: metadata.PackageMetadata) -> str:
    """Returns PEP 639's expression, else the classifiers, else the first line of the field License."""
    if "License-Expression" in about:
        return str(about["License-Expression"])
    named = [
        line.rpartition(" :: ")[2]
        for line in about.get_all("Classifier") or ()
        if line.startswith("License ::")
    ]
    stated = str(about["License"]).strip().partition("\n")[0][:_LONGEST_LICENCE] if "License" in about else ""
    return ", ".join(named) or stated or "not stated"


def _system() -> Iterator[Package]:
    """Yields the packages of Debian or Ubuntu; nothing on another system."""
    columns = "${Package}\t${Version}\t${db:Status-Abbrev}\n"
    try:
        listed = subprocess.run(
            ["dpkg-query", "--show", "--showformat", columns], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return
    for line in listed.splitlines():
        name, version, state = line.split("\t")
        if state.startswith("ii"):
            yield "system", name, version, _licences_of(Path(f"/usr/share/doc/{name}/copyright"))


def _licences_of(file: Path) -> str:
    """Returns the licences' short names in the package's copyright file (Debian's machine-readable format).

    If the file is prose, it is named instead.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "not stated"
    named = [" ".join(name.split()) for name in re.findall(r"^License:(.*\S)", text, re.MULTILINE)]
    return ", ".join(dict.fromkeys(named)) or f"see {file}"


if __name__ == "__main__":
    for package in installed():
        print(*package, sep="\t")
