"""The batch script of a job: a pure function of the job file. No clock, no cluster, no torch."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from trainer import jobfile
from trainer.errors import InputError
from trainer.job import Job, is_remote
from trainer.launch.environment import rank_environment
from trainer.launch.image.names import for_enroot
from trainer.launch.slurm.fits import refuse_misfits
from trainer.launch.templates import render

IMAGE_PYTHON = "/opt/clipship/bin/python"
MEETING = ("MASTER_ADDR", "MASTER_PORT", "CLIPSHIP_SUPERVISORS", "CLIPSHIP_TOKEN")
"""What the script finds out on the first node, beside `rank_environment`; the last two are `trainer.health.tree.Meeting`'s."""
_UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "CLIPSHIP_EXIT_DIR")
_WAIT_S = 30  # supervisors leave together: one that stays is on a node that is gone
_LINE = 120


@dataclass(frozen=True)
class Batch:
    """What the template shows of a job, worked out."""

    run: str
    directives: Sequence[tuple[str, str | None]]
    nodes: int
    per_node: int
    cpus: int
    starts: int
    variables: Mapping[str, str]
    names: Sequence[str]
    """Of all variables that a rank must get."""
    unset: Sequence[str]
    inside: str
    image: str
    mounts: Sequence[str]
    made: Sequence[str]
    """Folders that are mounted whether they are there or not."""
    nv: str
    python: str
    mpi: str
    wait_s: int
    suffix: str
    family: int
    interface: str
    address_kind: str
    bracketed: str
    job_text: str
    end_of_job: str

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def python_folder(self) -> str:
        """ "" where Python comes from PATH."""
        return self.python.rpartition("/")[0]

    @property
    def passed_on(self) -> list[str]:
        """mpirun's options that name the variables, as lines. Values stay off the command line, where everybody could read them."""
        return [
            line.replace("=", " ") for line in textwrap.wrap(" ".join(f"-x={name}" for name in self.names), _LINE, break_on_hyphens=False)
        ]


def batch_script(job: Job) -> str:
    """The text for sbatch. Raises InputError where the job cannot run as [slurm] says."""
    return render("slurm/train.sbatch.j2", job=job, batch=_batch(job))


def _batch(job: Job) -> Batch:
    refuse_misfits(job)
    slurm, resources = job.slurm, job.resources
    run = str(PurePosixPath(job.logging.runs, job.name))
    variables = _variables(job)
    mounts = _mounts(job) if slurm.container != "none" else ()
    text = jobfile.dump(job)
    return Batch(
        run=run,
        directives=list(_directives(job)),
        nodes=resources.nodes,
        per_node=resources.gpus_per_node,
        cpus=resources.cpus_per_gpu,
        starts=slurm.max_restarts + 1,
        variables=variables,
        names=sorted({*variables, *MEETING}),
        unset=[*_UNSET, *(("PYTHONPATH", "PYTHONHOME") if slurm.container != "none" else ())],
        inside={"none": "", "pyxis": " in a pyxis container", "apptainer": " in an apptainer container"}[slurm.container],
        image=_image(job) if slurm.container != "none" else "",
        mounts=mounts,
        made=_made(job) if slurm.container != "none" else (),
        nv="" if slurm.gpus == "none" else "--nv ",
        python=slurm.python or ("python" if slurm.container == "none" else IMAGE_PYTHON),
        mpi=slurm.mpi if job.comm.backend == "horovod" else "none",
        wait_s=_WAIT_S,
        suffix=slurm.name_suffix or "",
        family=6 if slurm.rendezvous == "ipv6" else 4,
        interface=f"dev {slurm.interface}" if slurm.interface else "",
        address_kind=("IPv6" if slurm.rendezvous == "ipv6" else "IPv4")
        + " address"
        + (f" on {slurm.interface}" if slurm.interface else ""),
        bracketed="[$address]" if slurm.rendezvous == "ipv6" else "$address",
        job_text=text,
        end_of_job=_end_mark(text),
    )


def _directives(job: Job) -> Iterator[tuple[str, str | None]]:
    """Options of sbatch in the order of a reader's questions: what, how much, how long, where, and then."""
    slurm, resources = job.slurm, job.resources
    per_node = resources.gpus_per_node
    yield "job-name", job.name
    yield "nodes", str(resources.nodes)
    yield "ntasks-per-node", str(per_node)
    yield "cpus-per-task", str(resources.cpus_per_gpu)
    gpus = f"{slurm.gpu_type}:{per_node}" if slurm.gpu_type else str(per_node)
    if slurm.gpus != "none":
        yield ("gpus-per-node", gpus) if slurm.gpus == "gpus-per-node" else ("gres", f"gpu:{gpus}")
    if slurm.mem or resources.mem_gb_per_gpu:
        yield "mem", slurm.mem or f"{math.ceil((resources.mem_gb_per_gpu or 0) * per_node * 1024)}M"
    for option in ("time", "partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "dependency", "array"):
        if value := getattr(slurm, option):
            yield option, value
    if slurm.exclusive:
        yield "exclusive", None
    if slurm.mail_type:
        yield "mail-type", ",".join(slurm.mail_type)
    if slurm.mail_user:
        yield "mail-user", slurm.mail_user
    yield "signal", f"B:{slurm.signal}@{slurm.signal_lead_s}"
    yield "requeue" if slurm.requeue else "no-requeue", None
    yield "open-mode", "append"
    for option, value in slurm.extra.items():
        if value is not False:
            yield option, None if value is True else str(value)


def _variables(job: Job) -> dict[str, str]:
    """Of a rank, under the names that bring them there: apptainer takes APPTAINERENV_X for X, and its --env splits values at commas."""
    variables = rank_environment(job, job.resources.world_size)
    if job.slurm.container == "none":
        return variables
    if job.comm.backend == "horovod":  # PMIx within a container: no munge there, and no memory shared with the server outside
        variables = {"PMIX_MCA_gds": "hash", "PMIX_MCA_psec": "native", **variables}
    if job.slurm.container == "apptainer":
        return {f"{_PREFIX}{name}": _in_double_quotes(value) for name, value in variables.items()}
    return variables


def _in_double_quotes(value: str) -> str:
    """Apptainer (1.4) puts a value between double quotes for a shell to read, and takes care of double quotes in it alone."""
    return value.replace("\\", "\\\\").replace("$", "\\$").replace("`", "\\`")


_PREFIX = "APPTAINERENV_"


def _image(job: Job) -> str:
    """As the container's own tool writes it."""
    slurm = job.slurm
    name = slurm.image or job.image.tag or ""  # a container without one has been refused
    if name.startswith("/") or "://" in name or "#" in name:
        return name
    if slurm.container == "apptainer":
        return f"docker://{name}"
    return for_enroot(name)


def _mounts(job: Job) -> list[str]:
    """The user's, the folders that the job names at their own places, and /dev/shm, over which the ranks of a node speak.

    A place comes before those within it, which it would hide.
    """
    given = _given(job)
    for mount, place in zip(job.slurm.mounts, given, strict=True):
        host, _, *mode = mount.split(":")
        if _within(job.logging.runs, place) and ((host.rstrip("/") or "/") != place or "ro" in mode):
            raise InputError(
                f"slurm.mounts has {mount}, and the run folder is in {place}: the batch script, outside of the container, reads and writes "
                f"it too. Mount it at its own place, writable, or leave it out: it is mounted by itself"
            )
    own = [folder for folder in _folders(job) if not any(_within(folder, place) for place in given)]
    wrong = [folder for folder in own if "," in folder or ":" in folder]
    if wrong:
        raise InputError(f"{wrong[0]}: a folder with a comma or a colon cannot be mounted into a container; rename it, or use slurm.mounts")
    shared = [] if any(_within("/dev/shm", place) for place in given) else ["/dev/shm:/dev/shm"]
    mounts = [*job.slurm.mounts, *(f"{folder}:{folder}" for folder in own), *shared]
    return sorted(mounts, key=lambda mount: len(PurePosixPath(mount.split(":")[1]).parts))


def _given(job: Job) -> list[str]:
    """Where in the container the user's own mounts are."""
    return [mount.split(":")[1].rstrip("/") or "/" for mount in job.slurm.mounts]


def _made(job: Job) -> list[str]:
    """Folders that the first run of a job finds missing, and a container's tool would then refuse to mount."""
    wanted = [folder for folder in (job.model.cache_dir, job.data.index) if folder]
    return [folder for folder in wanted if not any(_within(folder, place) for place in _given(job))]


def _folders(job: Job) -> list[str]:
    """Of the files that ranks read and write; a folder within another one of them is seen with it."""
    data, evaluation, model = job.data, job.eval, job.model
    files = [*data.train, *evaluation.retrieval, *evaluation.zero_shot]
    files += [value for value in (evaluation.class_names, evaluation.templates) if isinstance(value, str)]
    files += [value for value in (model.name, model.pretrained, job.checkpoint.resume) if value and value.startswith("/")]
    folders = {_fixed_folder(name) for name in files if not is_remote(name) and name.startswith("/")}
    folders |= {folder for folder in (job.logging.runs, model.cache_dir, data.index) if folder}
    return sorted(folder for folder in folders if not any(folder != other and _within(folder, other) for other in folders))


def _fixed_folder(pattern: str) -> str:
    """The part before the first special character of a pattern, to its last slash."""
    plain = pattern
    for special in "*?[{":
        plain = plain.partition(special)[0]
    return str(PurePosixPath(plain if plain.endswith("/") else PurePosixPath(plain).parent))


def _within(folder: str, other: str) -> bool:
    return PurePosixPath(folder).is_relative_to(other)


def _end_mark(text: str) -> str:
    """A line that the job file does not have."""
    mark = "END_OF_JOB"
    while mark in text.splitlines():
        mark += "_"
    return mark
