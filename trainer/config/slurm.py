"""`[slurm]`: requests to sbatch, the ranks' container, and the reaction to the time limit."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from trainer.config.keys import JobPath
from trainer.config.types import SchedulerSection, Text, checked, each, fits, names_fit
from trainer.sysinfo.accelerators import CUDA, GRES
from trainer.sysinfo.own_table import own_table

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d|[01]\d|2[0-3])(?::(?P<rest>[0-5]\d(?::[0-5]\d)?))?"
    r"|(?P<plain>\d+(?::[0-5]\d){0,2}))",
    re.ASCII,
)
_WORD = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
MEMORY = re.compile(r"(?P<count>[1-9]\d*)(?P<unit>[KMGT]?)|0", re.ASCII)
_COUNT = re.compile(r"([1-9]\d*)[KMGT]?", re.ASCII)
_REPLACED = re.compile(r"%(.?)", re.DOTALL)
_KNOWN = ("j", "x", "u", "A", "a", "%")
"""Letters behind a % in a file's name that do not depend on the node."""


def memory_bytes(text: str) -> int | None:
    """Returns the bytes of an amount of memory such as "480G"; None for "0", which is all of a node.

    A number without a unit is in MiB. Raises ValueError for another text.
    """
    if (match := MEMORY.fullmatch(text)) is None:
        raise ValueError(
            f'"{text}" is not an amount of memory for Slurm; write a whole number and one of K, M, G, '
            'T, such as "480G", or "0" for all of a node'
        )
    if match["count"] is None:
        return None
    return int(match["count"]) << 10 * ("KMGT".index(match["unit"] or "M") + 1)


@dataclass(frozen=True)
class Gres:
    """Generic resources that a job asks of each node."""

    name: str
    type: str | None
    count: int


def parse_gres(text: str) -> Gres:
    """Returns what "NAME[:TYPE][:COUNT]" asks for. Raises ValueError for another text."""
    name, *rest = text.split(":")
    count = _COUNT.fullmatch(rest[-1]) if rest else None
    types = rest[:-1] if count else rest
    if len(types) > 1 or not all(map(_WORD.fullmatch, (name, *types))):
        raise ValueError(
            f'"{text}" is no generic resource: write "NAME[:TYPE][:COUNT]", such as "gpu:h100:8" or "nvme:1"'
        )
    return Gres(name, types[0] if types else None, int(count[1]) if count else 1)


def check_output(pattern: str) -> None:
    """Raises ValueError for a file name whose parts Slurm replaces by what is not known beforehand."""
    folder, _, name = pattern.rpartition("/")
    if not pattern.isprintable():
        raise ValueError(f"{pattern!r} has a character that is not printable: rename its folder")
    if not name:
        raise ValueError(f'"{pattern}" is a folder: name a file in it, such as "{pattern}%x-%j.out"')
    if "%" in folder:
        raise ValueError(f'"{pattern}": Slurm makes no folders, so that only the file name may have a %')
    if wrong := [found[0] for found in _REPLACED.finditer(name) if found[1] not in _KNOWN]:
        raise ValueError(f'"{pattern}" has {wrong[0]}: known are %j, %x, %u, %A, %a, and %% for a %')
    if "%j" not in name and "%A" not in name:
        raise ValueError(f'"{pattern}" needs %j, the id of the job: else two jobs would write one file')


def output_file(pattern: str, job_id: str, name: str, user: str) -> str:
    """Returns the file that Slurm makes of a pattern; `job_id` is a job's, or 12_3 for a task of an array."""
    array, _, task = job_id.partition("_")
    values = {"j": job_id, "A": array, "a": task, "x": name, "u": user, "%": "%"}
    return _REPLACED.sub(lambda found: values.get(found[1], found[0]), pattern)


def seconds(time: str) -> int:
    """Returns the seconds of a time limit in Slurm's notation. Raises ValueError for another text."""
    match = TIME.fullmatch(time)
    if match is None:
        raise ValueError(time)
    if match["plain"] is None:
        minutes, _, seconds = (match["rest"] or "0").partition(":")
        return ((int(match["days"]) * 24 + int(match["hours"])) * 60 + int(minutes)) * 60 + int(seconds or 0)
    parts = [int(part) for part in match["plain"].split(":")]
    if len(parts) < 3:  # minutes, and seconds
        parts = [0, *parts]
    return sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))


def check_options(
    options: Mapping[str, str | bool], program: Literal["sbatch", "srun"], example: str
) -> None:
    """Raises ValueError for options that are none, that follow from other keys or that no key sets.

    Slurm's programs take the beginning of an option's name for the option.
    """
    if not options:
        return
    table = own_table(__file__, "slurm_options.toml")[program]
    refused = {option: f"follows from {key}: change that instead" for option, key in table["own"].items()}
    refused |= {option: f"cannot be set: {reason}" for option, reason in table["fixed"].items()}
    for name, given in options.items():
        if not _OPTION.fullmatch(name):
            raise ValueError(
                f'"{name}" is not a long option of {program}; write it without the dashes: {example}'
            )
        if name in refused:
            raise ValueError(f"{name} {refused[name]}")
        if name not in table["whole"] and (longer := [each for each in refused if each.startswith(name)]):
            raise ValueError(f"{name} is short for {longer[0]} to {program}, and that {refused[longer[0]]}")
        if isinstance(given, str) and not given.isprintable():
            raise ValueError(f"{name} = {given!r} must be one line of printable characters")


_NO_SPACE = re.compile(r"[!-~]+")
_CHAIN = re.compile(r"\d+(-\d+)?%1", re.ASCII)
_REMOVAL_S = 30
"""Seconds that the removal of a pyxis container may take after its ranks have left; it takes 7 to 26 s with
an image of 6 GB."""
_NETWORK_NAME = re.compile(r"[A-Za-z0-9_.@:-]+")
_MODULE = re.compile(r"[\w./+@:=-]+", re.ASCII)

OneLine = Annotated[str, StringConstraints(min_length=1)]

GpuRequest = Literal["gpus-per-node", "gres", "none"]


def is_image_file(name: str) -> bool:
    """Returns whether `slurm.image` is a file, and not a name in a registry."""
    return name.startswith(("./", "../", "~/")) or ("://" not in name and name.endswith((".sif", ".sqsh")))


def has_slash(name: str) -> bool:
    """Returns whether a program is a path, and not a command that PATH finds."""
    return "/" in name


class Slurm(SchedulerSection):
    """Requests to sbatch beyond [resources], and settings of the ranks under Slurm."""

    partition: Text | None = None
    """Partition that the job is submitted to. None: the cluster's default."""
    account: Text | None = None
    """Account that the job's resources are charged to. None: the user's default."""
    time: Text | None = None
    """Limit on the run time: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS. None: the partition's
    own."""
    mem: Text | None = None
    """Memory of a node in Slurm's notation: "480G", or "0" for all of it. None: resources.mem_gb_per_gpu
    times GPUs, else the partition's own."""
    gpus: GpuRequest | None = None
    """Option that asks for GPUs: --gpus-per-node; --gres=gpu:N, for older clusters; or none (ranks on CPUs).
    None: --gpus-per-node (for ascend --gres=npu:N), or no option if [resources] asks for the CPU."""
    nodelist: Text | None = None
    """Nodes that the allocation must include."""
    exclude: Text | None = None
    """Nodes that the allocation must not include."""
    array: Text | None = None
    """Split the run over N jobs, one after the other, each resuming where the one before stopped: "1-10%1".
    """
    gres: tuple[OneLine, ...] = ()
    """Generic resources of a node, "NAME[:TYPE][:COUNT]": ["nvme:1"]. If they name GPUs ("gpu:h100:8", or
    several types), these take the place of slurm.gpus, and are as many as resources.gpus_per_node."""
    output: Annotated[OneLine | None, JobPath(ranks=False)] = None
    """File for what the batch script and its steps print: %j is the job's id, %x its name, %u the user, %A
    and %a the ids of an array. Its folder must exist; `clipship submit` makes it. None: slurm-JOB.out in the
    run folder's logs, or where sbatch was called."""
    extra: dict[str, OneLine | bool] = Field(default_factory=dict)
    """Other options of sbatch, without their dashes: qos = "high", constraint = "ib", mail-type = "END,FAIL";
    true for an option without a value, such as exclusive. Options that follow from other keys are refused,
    and the message names the key."""
    hatch = "If it is an option of sbatch, give it as slurm.extra.{option}"

    srun: dict[str, OneLine | bool] = Field(default_factory=dict)
    """Other options of the srun that starts the ranks, without their dashes: hint = "nomultithread",
    container-writable = true for pyxis, or those of a site's own plugins. Options that follow from other keys
    are refused, and the message names the key."""

    container: Literal["none", "pyxis", "apptainer"] = "none"
    """Environment of the ranks: the nodes' own, or a container that srun (with NVIDIA's pyxis) or apptainer
    starts."""
    image: Annotated[OneLine | None, JobPath(when=is_image_file, ranks=False)] = None
    """Image of the container: a file (.sqsh for pyxis, .sif for apptainer) or a registry's name. None:
    image.tag."""
    image_dir: Annotated[OneLine | None, JobPath("folder", ranks=False)] = None
    """Folder of files that `clipship image squash` makes for pyxis, once for each image. All nodes see it,
    and `clipship submit` takes the file of image.tag where it is there. None: each node imports the image at
    every start."""
    mounts: tuple[OneLine, ...] = ()
    """Folders that the container sees, "/host/folder:/folder[:ro]". Those that the job file names are mounted
    automatically."""
    container_binary: Annotated[OneLine | None, JobPath(when=has_slash, ranks=False)] = None
    """Command or path of Apptainer on the nodes, where it has another name ("singularity") or is not on PATH.
    SingularityCE is another program, which reads variables under other names. None: apptainer."""
    container_flags: tuple[OneLine, ...] = ()
    """Other options of `apptainer exec`, each a text of its own: "--fakeroot", "--overlay=/scratch/x.img".
    Those of pyxis belong to slurm.srun."""
    modules: tuple[Text, ...] = ()
    """Environment modules to load first: "cuda/13.0"."""
    setup: tuple[OneLine, ...] = ()
    """Lines of bash that the batch script runs unchanged, after the modules: "source
    /shared/venv/bin/activate"."""
    python: Annotated[OneLine | None, JobPath(when=has_slash, ranks=False)] = None
    """Python that has clipship. None: the image's /opt/clipship/bin/python, or without a container the first
    `python` on PATH."""

    launcher: Literal["srun", "mpirun"] = "srun"
    """Program that starts the ranks. mpirun: Open MPI's, inside the allocation; for Horovod over MPI if Slurm
    has no PMIx."""
    mpi: Literal["pmix", "pmi2"] = "pmix"
    """Interface between srun and MPI, where that connects Horovod's ranks (comm.launcher); `srun --mpi=list`
    shows what a cluster has. Open MPI 5 supports only pmix."""
    rendezvous: Literal["name", "ipv4", "ipv6"] = "name"
    """Address of the first node for the ranks: its name in Slurm, or its first global address (of
    slurm.interface, if given)."""
    interface: Text | None = None
    """With rendezvous = "ipv4" or "ipv6": network interface that the address is taken from, such as "ib0"."""
    name_suffix: Text | None = None
    """With rendezvous = "name": suffix that turns a node's name into its name on the fast network; "i" on
    some clusters."""

    signal: Literal["USR2", "HUP", "INT"] = "USR2"
    """Signal that Slurm sends to the script before the time limit; ranks then save and leave. USR1 is not
    offered because NCCL may catch it, and TERM because scancel sends it."""
    signal_lead_s: Annotated[int, Field(ge=10, le=65535)] = 180
    """Seconds that ranks have to save and leave: more than a step and a checkpoint take. Slurm may signal a
    minute early. With pyxis the signal comes 30 s earlier, because enroot must also remove the containers
    before the time limit."""
    requeue: bool = True
    """Queue the job again after the time limit, a preemption or the loss of a node. Ranks save before the
    first two, so the next start resumes at the next sample; after the loss of a node it returns to the newest
    checkpoint."""
    retries: Annotated[int, Field(ge=0, le=100)] = 0
    """Times that a job which failed with exit code 1 is queued again, without the node that failed first. It
    goes on from the newest checkpoint. Bad input and passed time limits are not tried again."""
    max_restarts: Annotated[int, Field(ge=0, le=10_000)] = 100
    """Largest number of starts after the first, for any reason; beyond it the job fails."""

    @property
    def signal_before_end_s(self) -> int:
        """Seconds before the time limit at which Slurm signals the script.

        In them ranks leave, then their containers are removed.
        """
        return self.signal_lead_s + (_REMOVAL_S if self.container == "pyxis" else 0)

    @property
    def listed_gpus(self) -> tuple[Gres, ...]:
        """GPUs of a node that `gres` names, by their types."""
        return tuple(found for found in map(parse_gres, self.gres) if found.name in GRES)

    @property
    def uses_image(self) -> bool:
        """True if ranks run in a container."""
        return self.container != "none"

    @property
    def environment(self) -> str:
        """Python of the nodes, or the section's own image; "" if the ranks run in image.tag."""
        if self.uses_image:
            return f"{self.image} (slurm.image)" if self.image else ""
        python = f"{self.python} (slurm.python)" if self.python else "the first `python` on PATH"
        return f"{python} of the nodes{', after slurm.setup' if self.setup else ''}"

    @property
    def without_gpus(self) -> bool:
        """True if the job asks Slurm for no GPU."""
        return self.gpus == "none"

    _one_word = field_validator("partition", "account", "nodelist", "exclude")(
        fits(_NO_SPACE, '"{}" must be one word of ASCII characters')
    )

    _network_names = field_validator("interface", "name_suffix")(
        fits(_NETWORK_NAME, '"{}" must consist of letters, digits and any of . _ - @ :')
    )

    @field_validator("image", "image_dir", "python", "container_binary", "output")
    @classmethod
    def _one_line(cls, value: str | None) -> str | None:
        if value is not None and not value.isprintable():
            raise ValueError(f"{value!r} must be one line of printable characters")
        return value

    @field_validator("setup")
    @classmethod
    def _lines(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [line for line in value if not line.replace("\t", " ").isprintable()]:
            raise ValueError(
                f"{wrong[0]!r} must be one line of printable characters; give each line of the script as a "
                "text of its own"
            )
        return value

    @field_validator("time", "mem", mode="before")
    @classmethod
    def _a_bare_number(cls, value: object) -> object:
        return str(value) if type(value) is int else value

    @field_validator("time")
    @classmethod
    def _a_time_limit(cls, value: str | None) -> str | None:
        if value is not None and not TIME.fullmatch(value):
            forms = (
                '"90" (minutes), "30:00" (MM:SS), "12:30:00" (HH:MM:SS), "2-12" (D-HH), "2-12:30" or '
                '"2-12:30:00"'
            )
            raise ValueError(f'"{value}" is not a time limit for Slurm; write it as {forms}')
        if value is not None and not seconds(value):
            raise ValueError(
                f'"{value}" means no limit, and Slurm starts jobs without a limit last: give a limit, or '
                "leave time out for the partition's own"
            )
        return value

    _memory = field_validator("mem")(checked(memory_bytes))

    _a_chain = field_validator("array")(
        fits(
            _CHAIN,
            '"{}": the jobs of an array share this run, so they must come one after the other: write '
            '"1-10%1"',
        )
    )

    _module_names = field_validator("modules")(
        names_fit(_MODULE, "not the name of a module; expected a name such as cuda/13.0")
    )

    @field_validator("mounts")
    @classmethod
    def _mounts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for mount in value:
            if (
                "," in mount
                or not mount.isprintable()
                or not re.fullmatch(r"/[^:]*:/[^:]*(:[a-z+]+)?", mount)
            ):
                raise ValueError(
                    f'"{mount}" is not a mount; write "/host/folder:/folder" or "/host/folder:/folder:ro", '
                    "with paths without commas and colons"
                )
            if not mount.split(":")[1].strip("/"):
                raise ValueError(f'"{mount}" would hide all of the image: mount the folder elsewhere')
        return value

    @field_validator("extra")
    @classmethod
    def _free_options(cls, value: dict[str, str | bool]) -> dict[str, str | bool]:
        check_options(value, "sbatch", 'licenses = "matlab:1"')
        return value

    _generic_resources = field_validator("gres")(each(parse_gres))

    _output_file = field_validator("output")(checked(check_output))

    @field_validator("srun")
    @classmethod
    def _step_options(cls, value: dict[str, str | bool]) -> dict[str, str | bool]:
        check_options(value, "srun", 'hint = "nomultithread"')
        return value

    @field_validator("container_flags")
    @classmethod
    def _flags(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for flag in value:
            if not flag.isprintable() or not flag.startswith("-"):
                raise ValueError(
                    f'{flag!r} is not an option of apptainer: write each option as one text, "--option=value"'
                )
            if flag.partition("=")[0] in ("--bind", "-B", "--pwd", "--cwd", "--env", *CUDA.apptainer):
                raise ValueError(f"{flag} is set by clipship: folders are slurm.mounts, variables [env]")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> "Slurm":
        if self.time is not None and seconds(self.time) <= self.signal_before_end_s:
            removal = (
                ""
                if self.container != "pyxis"
                else f" plus the {_REMOVAL_S} s that the removal of a container may take"
            )
            raise ValueError(
                f'time = "{self.time}" is not longer than signal_lead_s = {self.signal_lead_s}{removal}: '
                "the run would be stopped as soon as it starts; raise time, or lower signal_lead_s"
            )
        if self.listed_gpus and self.gpus:
            raise ValueError("gres names the GPUs, so that gpus says the same twice: leave one of them out")
        if self.retries and not self.requeue:
            raise ValueError(
                f"retries = {self.retries} queues a failed job again, and requeue = false forbids that"
            )
        if self.interface and self.rendezvous == "name":
            raise ValueError(
                'interface needs rendezvous = "ipv4" or "ipv6": with "name", the address follows from the '
                "node's name"
            )
        if self.name_suffix and self.rendezvous != "name":
            raise ValueError('name_suffix needs rendezvous = "name"')
        if self.launcher == "mpirun" and self.container == "pyxis":
            raise ValueError(
                'launcher = "mpirun" cannot start pyxis containers, which are an option of srun: use '
                'launcher = "srun"'
            )
        if self.container != "apptainer" and (self.container_binary or self.container_flags):
            key = "container_binary" if self.container_binary else "container_flags"
            raise ValueError(
                f'{key} is for container = "apptainer", and container = "{self.container}"'
                + ("; options of pyxis belong to slurm.srun" if self.container == "pyxis" else "")
            )
        if self.image_dir and (self.image or self.container != "pyxis"):
            other = f'image = "{self.image}"' if self.image else f'container = "{self.container}"'
            raise ValueError(
                f'image_dir has files of image.tag for container = "pyxis", and this section has {other}: '
                "leave out one of the two"
            )
        if self.launcher == "mpirun" and self.srun:
            raise ValueError('srun has options of srun, and launcher = "mpirun" starts the ranks without it')
        if self.container == "none" and self.mounts:
            raise ValueError('mounts are for containers, and container = "none"')
        return self
