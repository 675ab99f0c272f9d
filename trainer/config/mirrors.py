"""`[image.mirrors]`: where an image's build gets packages and its base, and the table of public mirrors."""

import re
from typing import Annotated, Literal

from pydantic import StringConstraints, field_validator, model_validator

from trainer.config.image_name import full_name
from trainer.config.keys import OnlyIf
from trainer.config.types import ONE_LINE, Section
from trainer.sysinfo.own_table import own_table
from trainer.text.masking import secret_in

Line = Annotated[str, StringConstraints(min_length=1, pattern=ONE_LINE)]

_REGISTRY = re.compile(
    r"(?:localhost|[a-zA-Z0-9-]+(?:\.[a-zA-Z0-9-]+)+|[a-zA-Z0-9-]+(?=:)|\[[0-9a-fA-F:]+\])(?::\d{1,5})?"
    r"(?:/[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*)*",
    re.ASCII,
)
"""A host as Docker tells it from a folder (by a dot, a port or its name), then folders."""
_OF_DOCKER_HUB = OnlyIf(
    lambda job: path_at_hub(job.image.base) is not None,
    "image.base {job.image.base} is of another registry than Docker Hub",
)


def presets() -> dict[str, dict[str, str]]:
    """Returns the package index (`pip`) and the address of the archives (`apt`) of each public mirror."""
    return own_table(__file__, "mirrors.toml")


def path_at_hub(name: str) -> str | None:
    """Returns the path of an image at Docker Hub, with its tag; None if another registry has it."""
    host, _, path = full_name(re.sub(r"\A(?:index\.)?docker\.io/", "", name)).partition("/")
    return path if host == "docker.io" else None


class Mirrors(Section):
    """Mirrors from which an image's build takes its base and its packages.

    Only the build asks them. Their addresses do not get into the image, its labels, history or environment.
    """

    preset: Literal["aliyun", "huaweicloud", "tuna", "ustc"] | None = None
    """Public mirror in China whose `pip`, `apt` and `apt_security` are used where the job names none."""
    pip: Line | None = None
    """URL of the package index that pip asks, without a password: passwords go into site.pip_conf."""
    apt: Line | None = None
    """URL of the archive of Debian's or Ubuntu's packages, http(s)://host/path; a dated snapshot makes builds
    repeatable."""
    apt_security: Line | None = None
    """URL of the security updates, given with `apt`: Debian has a separate archive for them, Ubuntu the same
    one. None: the preset's, else no security updates; beside an `apt` that is a dated snapshot, name its
    archive here, so that builds stay repeatable."""
    registry: Annotated[Line | None, _OF_DOCKER_HUB] = None
    """Registry that mirrors Docker Hub, as host or host/path: with mirror.example the base debian:12-slim is
    mirror.example/library/debian:12-slim. `clipship image build` asks it for the digest, takes that very
    image, and records the digest as a label beside the name that `image.base` has."""

    @field_validator("pip", "apt", "apt_security")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not re.fullmatch(r"https?://[^\s/]\S*", value):
            raise ValueError(f'"{value}" is not an address; expected http://host/path or https://host/path')
        if secret := secret_in(value):
            raise ValueError(
                f"contains {secret}, which would stay in the build's records: put it into the file that "
                "site.pip_conf or site.apt_auth names"
            )
        return value

    @field_validator("registry")
    @classmethod
    def _a_registry(cls, value: str | None) -> str | None:
        if value is not None and not _REGISTRY.fullmatch(value):
            raise ValueError(
                f'"{value}" is not a registry; expected host, host:port or host/path, without https:// and '
                "without a tag"
            )
        return value

    @model_validator(mode="after")
    def _one_security_archive(self) -> "Mirrors":
        if self.apt_security and not self.apt:
            raise ValueError(
                "apt_security needs apt: without apt the archives are the base's or the preset's"
            )
        return self

    def with_preset(self, system: str, architecture: str) -> "Mirrors":
        """Returns the mirrors with the preset's addresses where no key names one.

        `system` is the base's distribution as the stack table calls it, `architecture` Debian's name of the
        processor.
        """
        if self.preset is None:
            return self
        public = presets()[self.preset]
        folder, security = _archives(system, architecture)
        added = {
            "pip": self.pip or public["pip"],
            "apt": self.apt or f"{public['apt']}/{folder}",
            "apt_security": self.apt_security or f"{public['apt']}/{security}",
        }
        return self.model_copy(update=added)


def _archives(system: str, architecture: str) -> tuple[str, str]:
    """Returns the folders of a distribution's packages and of their security updates at a mirror."""
    if system.startswith("debian"):
        return "debian", "debian-security"
    ports = "ubuntu" if architecture == "amd64" else "ubuntu-ports"
    return ports, ports
