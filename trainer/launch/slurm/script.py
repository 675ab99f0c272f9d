"""The batch script of a job: a pure function of the job file.

Uses no clock and no cluster; imports no torch.
"""

import math
import posixpath
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal

import tomli_w

from trainer.comm.backends import meeting_variables, over_mpi, starts_again
from trainer.config import Job
from trainer.config.image_folders import hidden_by
from trainer.config.image_name import for_enroot
from trainer.config.loader import own_keys
from trainer.config.slurm import GpuRequest
from trainer.config.stages import paths_of_ranks
from trainer.errors import InputError
from trainer.launch.fabric import cluster_environment, pins_memory
from trainer.launch.named_places import folder_of, named_places
from trainer.launch.open_mpi import exports, mpirun_options
from trainer.launch.slurm.validate import can_keep_going, launcher, validate
from trainer.launch.templates import render, sh
from trainer.run.goodput_log import BEGAN
from trainer.world.variables import GENERATION, KEEPS_GOING, RESPAWNS, SPARE_NODES, STARTS_AGAIN, SUBMISSION

IMAGE_PYTHON = "/opt/clipship/bin/python"
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "CLIPSHIP_SUPERVISORS", "CLIPSHIP_TOKEN")
"""Addresses and the token, which the script sets on the first node; the last two variables are those of
`trainer.world.rendezvous.Rendezvous`."""
_UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "CLIPSHIP_EXIT_DIR")
_WAIT_S = 30  # supervisors exit together: one that stays is on a lost node
_LINE = 120
_TASK_ID = "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
"""Id of an array's task, as `squeue --jobs` takes it; that of the job if the script is submitted alone."""
_PLAIN = re.compile(r"[\w=:/.,@%+-]{1,80}", re.ASCII)
_LIST_OF_ONE = re.compile(r"= \[\n    ([^\n]*),\n\]\n")


def batch_script(job: Job, *, in_array: bool = False) -> str:
    """Returns the text for sbatch. Raises InputError if the job cannot run as [slurm] says.

    With `in_array` the run is a task of an array, whose own id is that of the array and its number there.
    """
    return render("slurm/train.sbatch.j2", job=job, sbatch=_context(job, in_array))


def _context(job: Job, in_array: bool) -> dict[str, Any]:
    """Returns the values of a job for the template, already computed."""
    validate(job)
    slurm, nodes = job.slurm, job.resources.nodes + job.recovery.spare_nodes
    variables = _variables(job)
    names = sorted(
        {*variables, *RENDEZVOUS, BEGAN, SUBMISSION, *((GENERATION,) if _starts_again(job) else ())}
    )
    text = _compact(tomli_w.dumps(own_keys(job)))
    return {
        "run": str(PurePosixPath(job.logging.runs, job.name)),
        "directives": list(directives(job)),
        "nodes": nodes,  # of the allocation, spares included
        "ranks": nodes * job.resources.ranks_per_node,  # supervisors, those of spare nodes included
        # The job and the ranks' supervisors go on without one of them, or without a node.
        "keeps_going": _keeps_going(job),
        # The script starts all supervisors again when they ask for it: MPI ends all when one is gone.
        "starts_again": bool(_starts_again(job)),
        "leaves_out": _leaves_out(job),
        # The next start does without nodes that the run left out, or that failed.
        "excludes": _leaves_out(job) or slurm.retries > 0,
        "job_id": _job_id(job, in_array),
        # The id of what runs now: of one task of an array, whose own id may be the array's.
        "task_id": _TASK_ID if in_array or slurm.array else "$SLURM_JOB_ID",
        "max_starts": slurm.max_restarts + 1,  # the first included
        "exports": _export_lines(variables),  # names with quoted values
        "step_options": [*([("cpu-bind", "none")] if _binds_ranks(job) else []), *_given(slurm.srun)],
        "mpirun": _mpirun_lines(job, nodes, names),
        "mpi": slurm.mpi if over_mpi(job, launcher(job)) else "none",
        "without_pmix": _without_pmix(job),
        "mem_bind": str(slurm.extra.get("mem-bind") or ""),
        "pins_memory": pins_memory(job),
        "wait_s": _WAIT_S,
        # The longest wait for ranks that were asked to save and leave.
        "save_s": math.ceil(job.timeouts.checkpoint_s + job.timeouts.shutdown_s),
        "variable_names": names,  # all that a rank must get
        "job_text": text,
        "end_of_job": _end_mark(text),
        **_around_ranks(job),
        **_address(job),
    }


def _around_ranks(job: Job) -> dict[str, Any]:
    """Returns what the ranks run in: a container and its folders, or the nodes' own Python."""
    slurm, contained = job.slurm, job.slurm.container != "none"
    python = slurm.python or (IMAGE_PYTHON if contained else "python")
    return {
        "container_note": f" in {'an' if slurm.container == 'apptainer' else 'a'} {slurm.container} container"
        if contained
        else "",
        "image": _image(job) if contained else "",
        "mounts": _mounts(job) if contained else (),
        "created_folders": _created_folders(job) if contained else (),  # mounted whether they exist or not
        # Each node must see the run folder before a container mounts it; ranks without one say it themselves.
        "looks_first": contained and job.resources.nodes + job.recovery.spare_nodes > 1,
        "unset": [*_UNSET, *(("PYTHONPATH", "PYTHONHOME") if contained else ())],
        "apptainer": [
            slurm.container_binary or "apptainer",
            "exec",
            *([] if _gpu_request(job) == "none" else job.resources.row.apptainer),
            *slurm.container_flags,
        ],
        "python": python,
        "python_folder": python.rpartition("/")[0],  # "" if Python comes from PATH
    }


def _address(job: Job) -> dict[str, Any]:
    """Returns what the script looks for as the address of the first node."""
    ipv6, interface = job.slurm.rendezvous == "ipv6", job.slurm.interface
    return {
        "ip_version": 6 if ipv6 else 4,
        "interface": f"dev {interface}" if interface else "",  # for `ip address`
        "address_kind": f"IPv{6 if ipv6 else 4} address" + (f" on {interface}" if interface else ""),
        "supervisor_host": "[$address]" if ipv6 else "$address",
    }


def _mpirun_lines(job: Job, nodes: int, variables: Sequence[str]) -> list[str]:
    """Returns lines of options of mpirun: the first says where the ranks are, the others what they get."""
    per_node = job.resources.ranks_per_node
    pairs = zip(*[iter(exports(variables))] * 2, strict=True)
    names = textwrap.wrap(" ".join(map("=".join, pairs)), _LINE, break_on_hyphens=False)
    places = mpirun_options(nodes * per_node, f"ppr:{per_node}:node")
    return [" ".join(places), *(line.replace("=", " ") for line in names)]


def _job_id(job: Job, in_array: bool) -> str:
    """Returns the shell's words for the id of the run's job, as `squeue --jobs` takes it."""
    if in_array:
        return _TASK_ID
    return "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}" if job.slurm.array else "$SLURM_JOB_ID"


def _leaves_out(job: Job) -> bool:
    """Returns whether the run may leave out nodes, without which the next start then does."""
    return _keeps_going(job) and job.resources.nodes + job.recovery.spare_nodes > 1


def _compact(text: str) -> str:
    """Returns the TOML text of tomli_w with a list of one value on one line.

    tomli_w writes no text over several lines, so that these brackets are no part of a value.
    """
    return _LIST_OF_ONE.sub(r"= [\1]\n", text)


def _export_lines(variables: Mapping[str, str]) -> list[str]:
    """Returns what follows `export`: short plain values share lines, each other one has its own."""
    words = [f"{name}={sh(value)}" for name, value in variables.items()]
    plain = [word for word in words if _PLAIN.fullmatch(word)]
    others = [word for word in words if not _PLAIN.fullmatch(word)]
    lines = textwrap.wrap(
        " ".join(plain), _LINE - len("    export "), break_long_words=False, break_on_hyphens=False
    )
    return lines + others


def _keeps_going(job: Job) -> bool:
    """Returns whether the run may go on without a supervisor or a node."""
    return job.recovery.max_restarts > 0 and can_keep_going(job)


def _starts_again(job: Job) -> str:
    """Returns when the script must start all supervisors again, "" for never: STARTS_AGAIN."""
    return starts_again(job, launcher(job))


def _gpu_request(job: Job) -> GpuRequest | Literal["listed"]:
    """Returns the option of sbatch that asks for GPUs, or "none"; "listed" if slurm.gres has them."""
    if job.slurm.listed_gpus:
        return "listed"
    usual: GpuRequest = "gpus-per-node" if job.resources.row.gres == "gpu" else "gres"
    return job.slurm.gpus or ("none" if job.resources.on_cpu else usual)


def directives(job: Job) -> Iterator[tuple[str, str | None]]:
    """Yields options of sbatch in the order of a reader's questions.

    The questions are: what, how much, how long, where, and then.
    """
    slurm, resources = job.slurm, job.resources
    per_node = resources.ranks_per_node
    yield "job-name", job.name
    yield "nodes", str(resources.nodes + job.recovery.spare_nodes)
    yield "ntasks-per-node", str(per_node)
    yield "cpus-per-task", str(resources.cpus_per_gpu)
    if _gpu_request(job) == "gpus-per-node":
        yield "gpus-per-node", str(per_node)
    gpus = [f"{resources.row.gres}:{per_node}"] if _gpu_request(job) == "gres" else []
    if by_name := [*gpus, *slurm.gres]:
        yield "gres", ",".join(by_name)  # of several sbatch takes the last
    if slurm.mem or resources.mem_gb_per_gpu:
        yield "mem", slurm.mem or f"{math.ceil((resources.mem_gb_per_gpu or 0) * per_node * 1024)}M"
    for option in ("time", "partition", "account", "nodelist", "exclude", "array"):
        if value := getattr(slurm, option):
            yield option, value
    yield "signal", f"B:{slurm.signal}@{slurm.signal_before_end_s}"
    yield "requeue" if slurm.requeue else "no-requeue", None
    if _keeps_going(job):
        yield "no-kill", None
    if slurm.output:
        yield "output", slurm.output
    yield "open-mode", "append"
    yield from _given(slurm.extra)


def _binds_ranks(job: Job) -> bool:
    """Returns whether ranks bind themselves next to their GPUs, so that srun must leave them unbound.

    Slurm's own binding knows nothing of GPUs: it deals cores to the sockets in turn.
    """
    on_gpus = _gpu_request(job) != "none" and not job.resources.on_cpu
    return on_gpus and job.resources.bind_cpus and "cpu-bind" not in job.slurm.srun


def _given(options: Mapping[str, str | bool]) -> Iterator[tuple[str, str | None]]:
    """Yields options with their values, None for a switch; one that is false is left out."""
    for option, value in options.items():
        if value is not False:
            yield option, None if value is True else str(value)


def _variables(job: Job) -> dict[str, str]:
    """Returns a rank's variables, under the names that bring them there.

    apptainer takes APPTAINERENV_X for X; its --env would split values at commas.
    """
    recovery, resources = job.recovery, job.resources
    members = (resources.nodes + recovery.spare_nodes) * resources.ranks_per_node
    variables = {**cluster_environment(job, members), **meeting_variables(job, launcher(job))}
    if again := _starts_again(job):
        variables[STARTS_AGAIN] = again
    if _keeps_going(job):
        variables |= {KEEPS_GOING: "1", RESPAWNS: "1", SPARE_NODES: str(recovery.spare_nodes)}
    if job.slurm.container == "none":
        return variables
    if job.slurm.container == "pyxis" and _gpu_request(job) == "none":
        # images say "all", and enroot's hook would look for a driver
        variables = {**job.resources.row.hidden_by, **variables}
    # PMIx in a container has no munge, and no memory shared with the server outside.
    if over_mpi(job, launcher(job)):
        variables = {"PMIX_MCA_gds": "hash", "PMIX_MCA_psec": "native", **variables}
    if job.slurm.container == "apptainer":
        return {f"{_PREFIX}{name}": _in_double_quotes(value) for name, value in variables.items()}
    return variables


def _without_pmix(job: Job) -> str:
    """Returns the keys of the job file that start Horovod's ranks without PMIx; "" if they do not need it."""
    slurm = job.slurm
    if not over_mpi(job, launcher(job)) or (slurm.launcher, slurm.mpi) != ("srun", "pmix"):
        return ""
    others = (
        'comm.launcher = "clipship", for Gloo in place of MPI; '
        'or slurm.mpi = "pmi2", for an Open MPI 4 with PMI2'
    )
    # mpirun starts no pyxis container
    return others if slurm.container == "pyxis" else f'slurm.launcher = "mpirun"; or {others}'


def _in_double_quotes(value: str) -> str:
    """Returns the value escaped for Apptainer (1.4).

    Apptainer puts it between double quotes for a shell, and escapes only double quotes in it.
    """
    return value.replace("\\", "\\\\").replace("$", "\\$").replace("`", "\\`")


_PREFIX = "APPTAINERENV_"


def _image(job: Job) -> str:
    """Returns the image's name as the container's own tool writes it."""
    slurm = job.slurm
    name = slurm.image or job.image.tag or ""  # a container without an image has been refused
    if name.startswith("/") or "://" in name or "#" in name:
        return name
    if slurm.container == "apptainer":
        return f"docker://{name}"
    return for_enroot(name)


def _mounts(job: Job) -> list[str]:
    """Returns the mounts: the user's, the job's folders at their own paths, and /dev/shm.

    A node's ranks communicate through /dev/shm. A folder comes before those within it, which it would hide
    otherwise.
    """
    targets = _mount_targets(job)
    for mount, target in zip(job.slurm.mounts, targets, strict=True):
        host, _, *mode = mount.split(":")
        if _within(job.logging.runs, target) and ((host.rstrip("/") or "/") != target or "ro" in mode):
            raise InputError(
                f"slurm.mounts has {mount}, and the run folder is in {target}. The batch script, which runs "
                "outside of the container, uses the run folder too: mount it writable at its own path, or "
                "leave this mount out, because the run folder is mounted anyway."
            )
    own = _folders(job)
    wrong = [folder for folder in own if "," in folder or ":" in folder]
    if wrong:
        raise InputError(
            f"{wrong[0]}: a folder with a comma or a colon in its name cannot be mounted into a "
            "container; rename it, or mount another one with slurm.mounts"
        )
    shared = [] if any(_within("/dev/shm", target) for target in targets) else ["/dev/shm:/dev/shm"]
    mounts = [*job.slurm.mounts, *(f"{folder}:{folder}" for folder in own), *shared]
    return sorted(mounts, key=lambda mount: len(PurePosixPath(mount.split(":")[1]).parts))


def _mount_targets(job: Job) -> list[str]:
    """Returns the paths in the container at which the user's own mounts are."""
    return [mount.split(":")[1].rstrip("/") or "/" for mount in job.slurm.mounts]


def _created_folders(job: Job) -> list[str]:
    """Returns folders that the first run of a job makes.

    A container's tool would refuse to mount missing ones.
    """
    folders = [folder for folder, mark in paths_of_ranks(job) if mark.made]
    return [
        folder for folder in folders if not any(_within(folder, target) for target in _mount_targets(job))
    ]


def _folders(job: Job) -> list[str]:
    """Returns the folders of the files that ranks read and write, but for files on the user's own mounts.

    A folder within another one is left out, because it is seen with it. Raises InputError for one that would
    hide what the image has.
    """
    folders, targets = set[str](), _mount_targets(job)
    for path, mark in paths_of_ranks(job):
        places = named_places(path, mark)
        found = [folder_of(each, mark) for each in places if not any(_within(each, t) for t in targets)]
        together = posixpath.commonpath(found) if found else ""
        folders |= {together} if found and not hidden_by(together) else set(found)
    for folder in folders:
        if hidden := hidden_by(folder):
            raise InputError(
                f"{folder} cannot be mounted into a container, where it would hide the image's {hidden}: "
                "move the job's files in it into a folder of their own, or mount that with slurm.mounts"
            )
    return sorted(
        folder
        for folder in folders
        if not any(folder != other and _within(folder, other) for other in folders)
    )


def _within(folder: str, other: str) -> bool:
    return PurePosixPath(folder).is_relative_to(other)


def _end_mark(text: str) -> str:
    """Returns a line that does not occur in the job file."""
    mark = "END_OF_JOB"
    while mark in text.splitlines():
        mark += "_"
    return mark
