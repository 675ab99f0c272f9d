"""`[stack]` and `[image]`: the container that ranks run in, and the parts that it is built from."""

import re
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from trainer.config.builders import ABILITIES
from trainer.config.keys import JobPath, OnlyIf
from trainer.config.mirrors import Line, Mirrors
from trainer.config.types import (
    ABSOLUTE_PATH,
    COMPUTE_CAPABILITY,
    ONE_LINE,
    RELEASE,
    VERSION,
    Positive,
    Section,
    Text,
    VariableName,
    names_fit,
    optional_section,
    refuse,
    refuse_names,
)
from trainer.text.masking import looks_secret, secret_in

_CUDA_OF_BASE = OnlyIf(
    lambda job: "base" in (job.image.toolkit, job.stack.torch),
    'neither image.toolkit nor stack.torch is "base"',
)
_PART = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = rf"localhost|{_PART}(?:\.{_PART})+|{_PART}(?=:\d)|\[[0-9a-fA-F:]+\]"
_COMPONENT = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_IMAGE_NAME = re.compile(
    rf"(?P<name>(?:(?:{_HOST})(?::(?P<port>\d{{1,5}}))?/)?{_COMPONENT}(?:/{_COMPONENT})*)"
    r"(?::\w[\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
"""Image name as Docker reads it (distribution/reference, regexp.go): a first part that has a dot, has a port
or is localhost is a host."""
_LONGEST_NAME = 255
_LARGEST_PORT = 65535
_APT_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9]+)?(=[\w.+:~-]+)?", re.ASCII)
_RELEASE = re.compile(RELEASE, re.ASCII)

Version = Annotated[str, StringConstraints(pattern=VERSION)]

_LABEL = re.compile(r"[a-z0-9]([a-z0-9._/-]*[a-z0-9])?", re.ASCII)
_OWN_LABELS = ("org.clipship.", "org.opencontainers.image.revision", "org.opencontainers.image.base.")
"""Labels that say what the image was built from."""

_SET_BY_THE_IMAGE = {"PATH", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_CUDA"}


class Stack(Section):
    """Versions that the container image is built from; `clipship stacks` lists which go together."""

    torch: Text = "2.14.1"
    """PyTorch's version; CUDA, cuDNN, NCCL and Horovod follow from it. base: the torch that image.base
    brings, with its CUDA and NCCL."""
    cuda: Version | None = None
    """Expected CUDA release of this torch, such as 13.0. A different one is refused; that of a base is
    checked when the image is built."""
    nccl: Version | None = None
    """NCCL of the image, which Horovod uses too. None: the one that this torch pins. A newer one that
    `clipship stacks explain` names for this torch takes its place; any other is refused, as for `cuda`."""
    open_clip: Version = "3.3.0"
    """Version of open_clip_torch, which brings models, tokenizers and transforms."""
    archs: tuple[Annotated[str, StringConstraints(pattern=COMPUTE_CAPABILITY)], ...] = Field(
        default=("8.0", "9.0"), min_length=1
    )
    """Compute capabilities of the GPUs that the image is for: Horovod's kernels are compiled for each, for
    the last one also as PTX."""
    driver: Positive | None = None
    """Oldest NVIDIA driver branch on the nodes, such as 570. None: it is not checked here; the container
    runtime refuses a driver that is too old."""

    @field_validator("torch")
    @classmethod
    def _a_release(cls, value: str) -> str:
        if value != "base" and not _RELEASE.fullmatch(value):
            raise ValueError(
                f'"{value}" is not a release of torch; expected one of `clipship stacks`, such as "2.14.1", '
                'or "base"'
            )
        return value


class Site(Section):
    """Settings that an image build needs only at this site.

    They do not get into the image, its layers, labels, history or environment.
    """

    certificates: Annotated[tuple[Text, ...], JobPath(ranks=False)] = ()
    """Files of CA certificates (PEM) that apt and pip trust in addition to the base's own."""
    wheelhouse: Annotated[Text | None, JobPath("folder", ranks=False)] = None
    """Folder that `clipship image wheelhouse` filled; pip then asks no index."""
    sources: Annotated[Text | None, JobPath("folder", ranks=False)] = None
    """Folder with the archives of image.plugins, which `clipship fabrics explain NAME` names. None: the build
    downloads them."""
    pip_conf: Annotated[Text | None, JobPath(ranks=False)] = None
    """A pip.conf with passwords. It reaches the build as a secret; the classic builder, which cannot keep
    one, is refused."""
    apt_auth: Annotated[Text | None, JobPath(ranks=False)] = None
    """A file with passwords for apt's auth.conf.d; it reaches the build as pip_conf does."""

    @property
    def secrets(self) -> dict[str, str]:
        """The path of each secret by its name in BuildKit."""
        return {
            name: path for name, path in (("pip_conf", self.pip_conf), ("apt_auth", self.apt_auth)) if path
        }


class Image(Section):
    """Container image that a cluster runs."""

    tag: Text | None = None
    """Full name of the image, as `docker pull` takes it. None: the job runs without a container."""
    platform: Literal["linux/amd64", "linux/arm64"] = "linux/amd64"
    """System and processor that the image is for; linux/arm64 is for Grace (GH200, GB200) and other ARM
    nodes."""
    base: Text = "debian:12-slim"
    """Image to start from: Debian or Ubuntu, or a site's own image made from one. A digest (name@sha256:...)
    makes builds repeatable."""
    os: Literal["auto", "debian-12", "debian-13", "ubuntu-24.04", "ubuntu-22.04"] = "auto"
    """Distribution of the base; auto reads it from the base's name."""
    mpi: Literal["debian", "pypi", "base"] = "debian"
    """Open MPI from the system's packages (4.1 on Debian 12 and Ubuntu 24.04), from PyPI (5), or the one of
    the base."""
    toolkit: Literal["auto", "pypi", "debian", "base"] = "auto"
    """Source of nvcc, needed by the build only: PyPI, Debian 13's packages (non-free), or the base. auto: the
    first that the stack allows."""
    cuda_home: Annotated[str, StringConstraints(pattern=ABSOLUTE_PATH), _CUDA_OF_BASE] = "/usr/local/cuda"
    """Folder of the CUDA toolkit in the base; read if `toolkit` or stack.torch is "base"."""
    compiler: bool | None = None
    """Keep a C++ compiler in the image, which torch.compile needs. None: if the job sets model.compile."""
    apt_packages: tuple[Text, ...] = ()
    """Additional packages of the system, as name or name=version."""
    pip_packages: tuple[Line, ...] = ()
    """Additional Python packages, as pip takes them. They cannot change the version of a package that the
    stack pins."""
    plugins: tuple[Literal["aws-ofi-nccl", "nccl-rdma-sharp", "tcpxo"], ...] = ()
    """Plugins through which NCCL uses resources.fabric; `clipship fabrics explain NAME` says which one a
    network has, and where it comes from."""
    run: tuple[Line, ...] = ()
    """Shell commands that the build runs as root after all packages, each in a step of its own: a changed one
    is run again with those behind it. The image gets the files that they make or change, but for logs and
    caches (docs/image.md names the folders); torch and open_clip are there, Horovod and Clipship come
    later."""
    env: dict[VariableName, Annotated[str, StringConstraints(pattern=ONE_LINE)]] = Field(default_factory=dict)
    """Additional environment variables of the image, one line each; the section [env] sets those of a rank,
    with any text."""
    labels: dict[Text, Annotated[str, StringConstraints(pattern=ONE_LINE)]] = Field(default_factory=dict)
    """Additional labels of the image, such as `"org.opencontainers.image.vendor" = "Team"`."""
    builder: Literal["auto", "classic", "buildkit", "podman", "buildah"] = "auto"
    """Program that builds the image; podman and buildah need no daemon and no root. auto: BuildKit if a
    secret needs it, else the classic builder, which every Docker daemon has; podman or buildah where no
    daemon answers."""
    compression: Literal["gzip", "zstd", "zstd:chunked", "estargz"] = "gzip"
    """Form in which layers are pushed. A node that knows estargz (BuildKit) or zstd:chunked (podman, buildah)
    pulls of a changed layer only the files that it lacks; zstd unpacks faster than gzip."""
    mirrors: Mirrors = optional_section(Mirrors)
    site: Site = optional_section(Site)

    @field_validator("tag", "base")
    @classmethod
    def _a_reference(cls, value: str | None) -> str | None:
        if value is None:
            return None
        match = _IMAGE_NAME.fullmatch(value)
        if not match or len(match["name"]) > _LONGEST_NAME or int(match["port"] or 0) > _LARGEST_PORT:
            raise ValueError(
                f'"{value}" is not an image name; expected [registry/]name[:tag], with the name in lower case'
            )
        return value

    _package_names = field_validator("apt_packages")(
        names_fit(_APT_PACKAGE, "not a system package; expected name or name=version")
    )

    @field_validator("pip_packages")
    @classmethod
    def _requirements(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if text.startswith("-") or text != text.strip():
                raise ValueError(
                    f'"{text}" is not a requirement; expected a name with a version, such as "einops==0.8.1"'
                )
            if secret := secret_in(text):
                raise ValueError(
                    f"contains {secret}, which would stay in the image's history: put it into the file that "
                    "site.pip_conf names"
                )
        return value

    @field_validator("run")
    @classmethod
    def _without_secrets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if not text.strip():
                raise ValueError("an empty command; leave it out")
            if secret := secret_in(text):
                raise ValueError(f"contains {secret}, which would stay in the image's history: leave it out")
        return value

    @field_validator("labels")
    @classmethod
    def _labels(cls, value: dict[str, str]) -> dict[str, str]:
        refuse_names(
            value,
            _LABEL,
            'not a label; expected a-z, 0-9, ".", "_", "/" and "-", with a letter or digit at both ends',
        )
        refuse(
            (name for name in value if name.startswith(_OWN_LABELS)),
            "cannot be set, because it says what the image was built from",
        )
        for name, text in value.items():
            if why := looks_secret(name, text):
                raise ValueError(
                    f"{name} looks like a secret ({why}), and everybody who has the image could read it: "
                    "leave it out"
                )
        return value

    @field_validator("env")
    @classmethod
    def _free_names(cls, value: dict[str, str]) -> dict[str, str]:
        refuse(
            (name for name in value if name in _SET_BY_THE_IMAGE),
            "cannot be set, because it follows from the stack",
        )
        for name, text in value.items():
            if why := looks_secret(name, text):
                raise ValueError(
                    f"{name} looks like a secret ({why}), and everybody who has the image could read it: "
                    f'let ranks inherit {name}, or set kubernetes.env.{name} = "secret:SECRET:KEY"'
                )
        return value

    @model_validator(mode="after")
    def _one_index(self) -> "Image":
        if self.site.pip_conf and (self.mirrors.pip or self.site.wheelhouse):
            raise ValueError(
                "site.pip_conf excludes mirrors.pip and site.wheelhouse: name the index in that file"
            )
        return self

    @model_validator(mode="after")
    def _the_builder_can(self) -> "Image":
        able = ABILITIES.get(self.builder)
        if able and self.site.secrets and not able.keeps_secrets:
            raise ValueError(
                f"the {self.builder} builder would keep the passwords of "
                f"site.{' and site.'.join(self.site.secrets)} in the image's history; "
                'set builder = "buildkit" or leave it at "auto"'
            )
        if self.compression not in (able.compressions if able else ("gzip",)):
            fit = " or ".join(
                f'"{name}"' for name, row in ABILITIES.items() if self.compression in row.compressions
            )
            raise ValueError(
                f'the builder "{self.builder}" does not push layers with compression = "{self.compression}"; '
                f"set builder = {fit}"
            )
        return self
