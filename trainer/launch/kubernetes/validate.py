"""Finds settings that cannot work on Kubernetes, and settings that are allowed but rarely meant.

Asks no cluster.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainer.comm.backends import check_lost_nodes, check_restarts, many_without_mpi, row_of
from trainer.config import Job
from trainer.config.fabric_fit import fabric_problems
from trainer.config.job import LAUNCHERS_NAMES
from trainer.config.kubernetes import object_name
from trainer.config.loader import own_keys
from trainer.config.stages import paths_of_ranks, standard_input
from trainer.config.world_sizes import check_batches
from trainer.errors import problems_of, raise_problems
from trainer.launch.kubernetes.kinds import KINDS, kind_of
from trainer.launch.kubernetes.network import missing_annotations, network_warnings
from trainer.launch.kubernetes.places import carried, on_volume
from trainer.launch.named_places import named_places
from trainer.text.wording import many

_CONFIG_MAP_BYTES = 1024 * 1024
_LONGEST_NAMESPACE = 63
_OF_LAUNCHERS = ("CLIPSHIP_", "OMPI_", "PRTE_", "PMIX_")


def validate(job: Job) -> None:
    """Raises InputError with every problem, one per line."""
    checks: tuple[Callable[[Job], Iterator[str]], ...] = (
        _image,
        _name,
        _data,
        _kind,
        _launcher,
        _run_folder,
        _resources,
        fabric_problems,
        missing_annotations,
        _variables,
        _size,
        _batch,
    )
    raise_problems(problem for check in checks for problem in check(job))


def warnings(job: Job) -> Iterator[str]:
    """Yields a sentence for each setting that is allowed but rarely meant."""
    k8s, limits = job.kubernetes, job.timeouts
    if k8s.grace_s is not None and k8s.grace_s < limits.checkpoint_s:
        yield (
            f"kubernetes.grace_s = {k8s.grace_s} is less than timeouts.checkpoint_s = "
            f"{limits.checkpoint_s:g}: a pod may be killed while its checkpoint is written"
        )
    yield from network_warnings(job)
    yield from many_without_mpi(job, kind_of(job).launcher)
    for path in _outside(job):
        yield f"{path} is on no volume of [kubernetes.mounts]: the image must contain it"


def summary(job: Job) -> str:
    """Returns one line about the object.

    For an MPIJob it has the size of the operator's object that grows with the number of workers.
    """
    name, row = object_name(job.name, job.kubernetes, job.resources.nodes), kind_of(job)
    if row.keeps_going:
        pods = job.resources.nodes + job.recovery.spare_nodes
        return f"{row.kind} {name}, {many(pods, 'pod')}, started by {row.controller}"
    return (
        f"MPIJob {name}; the operator's list of {job.resources.nodes:,} workers takes {hosts_bytes(job):,} "
        f"of {_CONFIG_MAP_BYTES:,} bytes"
    )


def _image(job: Job) -> Iterator[str]:
    if job.image.tag is None:
        yield (
            "image.tag is missing: pods run a container image; give its full name, such as tag = "
            '"registry.example/ml/clipship:1"'
        )


def _name(job: Job) -> Iterator[str]:
    try:
        object_name(job.name, job.kubernetes, job.resources.nodes)
    except ValueError as problem:
        yield f"kubernetes.name: {problem}"


def _data(job: Job) -> Iterator[str]:
    if reads := standard_input(job):
        yield (
            f"{reads}: pods have no standard input; give the command that writes the samples, as pipe:COMMAND"
        )


def _kind(job: Job) -> Iterator[str]:
    row = kind_of(job)
    given = own_keys(job, but_defaults=True).get("kubernetes", {})
    useless = [key for key in row.without if _is_given(given, key)]
    if useless:
        able = " or ".join(
            f'"{other.name_in_job}"' for other in KINDS.values() if not set(useless) & set(other.without)
        )
        yield (
            f"kubernetes.{', '.join(useless)}: {row.kind}s have no use for it: leave it out"
            + (f", or set kubernetes.kind = {able}" if able else "")
        )


def _is_given(table: Mapping[str, Any], key: str) -> bool:
    first, _, rest = key.partition(".")
    return first in table and (not rest or _is_given(table[first], rest))


def _launcher(job: Job) -> Iterator[str]:
    row = kind_of(job)
    if job.comm.launcher not in ("auto", row.launcher):
        yield (
            f"comm.launcher = {job.comm.launcher} cannot start ranks in pods: {row.starts_ranks_by}; "
            f"use auto or {row.launcher}"
        )
    if (bound := row_of(job).bound_to(job.comm)) and bound[1] != row.launcher:
        yield f"{bound[0]} cannot be with {row.kind}s, where {row.starts_ranks_by}: leave one of them out"


def _run_folder(job: Job) -> Iterator[str]:
    mount = on_volume(job.logging.runs, job)
    if mount is None or not mount.is_shared:
        shared = [volume.path for volume in job.kubernetes.volumes if volume.is_shared]
        remedy = (
            f"put it below a path of [kubernetes.mounts] ({', '.join(shared)})"
            if shared
            else f'add to the job file the section [kubernetes.mounts] with the line "{job.logging.runs}" = '
            '"pvc:CLAIM", where CLAIM is a volume claim of your cluster that many pods may write'
        )
        yield (
            f"logging.runs = {job.logging.runs} is on no volume that the pods share, so a checkpoint "
            f"would be lost with its pod: {remedy}"
        )
    elif mount.read_only:
        yield (
            f"logging.runs = {job.logging.runs} is on {mount.path}, which is mounted read-only: remove :ro, "
            "or use another volume"
        )


def _resources(job: Job) -> Iterator[str]:
    asked, k8s = job.resources, job.kubernetes
    cores = asked.cpus_per_gpu * asked.ranks_per_node
    memory = None if asked.mem_gb_per_gpu is None else asked.mem_gb_per_gpu * asked.ranks_per_node
    if k8s.cpu_limit and k8s.cpu_request is not None and k8s.cpu_request > cores:
        yield (
            f"kubernetes.cpu_request = {k8s.cpu_request:g} is above the worker's {many(cores, 'core')}: "
            "lower it, or set cpu_limit = false"
        )
    if memory is not None and k8s.mem_request_gb is not None and k8s.mem_request_gb > memory:
        yield (
            f"kubernetes.mem_request_gb = {k8s.mem_request_gb:g} is above the worker's limit of {memory:g} "
            "GiB ([resources]): lower it"
        )
    if memory is not None and k8s.shm_gb is not None and k8s.shm_gb > memory:
        yield (
            f"kubernetes.shm_gb = {k8s.shm_gb:g} is above the worker's {memory:g} GiB of memory, of which it "
            "is a part: lower it"
        )


def _variables(job: Job) -> Iterator[str]:
    both = sorted(job.env.keys() & job.kubernetes.env.keys())
    if both:
        yield f"{', '.join(both)}: set in both [env] and [kubernetes.env]: leave one out"
    taken = [name for name in job.kubernetes.env if name.startswith(_OF_LAUNCHERS) or name in LAUNCHERS_NAMES]
    if taken:
        yield (
            f"kubernetes.env: {', '.join(taken)}: the launcher sets these for the ranks; settings of Open "
            "MPI belong in [env]"
        )


def _size(job: Job) -> Iterator[str]:
    """Yields a problem if the job's ConfigMap, or the operator's, would be too large.

    The operator writes every worker's name into its own twice: the hostfile, and a script for Horovod.
    """
    own = _own_bytes(job)
    if own > _CONFIG_MAP_BYTES:
        yield (
            f"the job file, with what travels beside it, takes {many(own, 'byte')}, but a ConfigMap holds at "
            f"most {_CONFIG_MAP_BYTES:,}: name shards by braces or globs ({{000..331}}.tar) and not one by "
            "one, or put model configs on a volume"
        )
    size = 0 if kind_of(job).keeps_going else hosts_bytes(job)
    if size > _CONFIG_MAP_BYTES:
        yield (
            f"resources.nodes = {job.resources.nodes}: the operator's list of workers takes "
            f"{many(size, 'byte')}, but a ConfigMap holds at most {_CONFIG_MAP_BYTES:,}: use fewer nodes, or "
            "a shorter kubernetes.name"
        )


def _own_bytes(job: Job) -> int:
    """Returns the bytes of the job's ConfigMap."""
    pods = kind_of(job)(job)
    users = (pods.passwd, pods.group) if pods.passwd else ()
    texts = (pods.job_text, *users, *(file.text for file in pods.carried))
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)


def hosts_bytes(job: Job) -> int:
    """Returns the bytes of the operator's ConfigMap.

    If the job names no namespace, the longest possible name is assumed.
    """
    k8s, nodes = job.kubernetes, job.resources.nodes
    try:
        name = len(object_name(job.name, k8s, nodes))
    except ValueError:
        return 0  # another check reports it
    namespace = len(k8s.namespace) if k8s.namespace else _LONGEST_NAMESPACE
    digits = _digits_below(nodes)
    host = name + len("-worker-") + 1 + name + 1 + namespace + len(".svc")
    slots = len(f" slots={job.resources.ranks_per_node}\n")
    return nodes * (host + slots) + digits + nodes * (host + len("echo \n")) + digits + len("#!/bin/sh\n")


def _digits_below(count: int) -> int:
    """Returns how many digits the numbers from 0 to `count` - 1 have together."""
    return count + sum(count - int(10**places) for places in range(1, len(str(count))))


def _batch(job: Job) -> Iterator[str]:
    yield from problems_of(
        (
            lambda: check_batches(job, job.resources.world_size),
            lambda: check_restarts(job, kind_of(job).launcher),
            lambda: check_lost_nodes(job, "[kubernetes]", keeps_going=kind_of(job).keeps_going),
        )
    )


def _outside(job: Job) -> Iterator[str]:
    """Yields files of the job that pods would look for in their image.

    The run folder is left out, because it has its own check, and so is what travels with the job.
    """
    elsewhere = {job.logging.runs, *(file.path for file in carried(job))}
    for path, mark in paths_of_ranks(job):
        places = [] if path in elsewhere else named_places(path, mark)
        if any(on_volume(place, job) is None for place in places):
            yield path
