"""Rank, world size and local rank of this process, read from what its launcher exports.

All functions are pure; this module imports no torch and no launcher code. A launcher is a row of `ROWS`; the
first complete row is believed. Launchers nest (`srun torchrun`, mpirun within a Slurm step), and the
environment of the outer one stays visible: each row names the launchers that may stand around it; their
numbers then mean something else (one for each node) and are passed over. Every other row that says anything
about this process must say the same, or it stops.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.errors import InputError
from trainer.sysinfo.accelerators import Accelerator
from trainer.text.wording import many
from trainer.world.variables import (
    CROSS,
    EXPECTED_SIZE,
    GENERATION,
    NODE,
    RESPAWNED,
    SPARE_NODES,
    STARTED_HERE,
    SUBMISSION,
)

SINGLE = "single process"
SUPERVISOR = "supervisor"
"""Row of the variables that a supervisor sets for its rank; the rank's launcher is still the first one."""

Environment = Mapping[str, str]


@dataclass(frozen=True)
class World:
    """Place of this process among the others.

    Ranks count from 0, local ones within the node; `launcher` is the one whose variables were believed.
    `local_size` is what the launcher says: Open MPI 5.0 has it wrong on hosts with unequal numbers of ranks,
    so nothing may depend on it.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    launcher: str
    generation: int = 1
    """Number of times that the ranks of this start have been started: 2 after the first restart."""
    submission: str = ""
    """Id that all starts of one submission to a scheduler have; "" outside of one."""
    slot: int | None = None
    """Local rank that the launcher gave, by which a GPU is chosen; None: the same as `local_rank`.

    They differ if a supervisor with a lower local rank is lost.
    """


@dataclass(frozen=True)
class LauncherRow:
    """A launcher and its variables for rank, size, local_rank and local_size.

    If a field has several variables, the first that is set counts.
    """

    launcher: str
    variables: tuple[tuple[str, ...], ...]
    around: frozenset[str] | None = frozenset()
    """Launchers that may stand around it; None: any."""
    applies: Callable[[Environment], bool] = lambda env: True


@dataclass(frozen=True)
class Claim:
    """Values that a row finds for this process: for each field the variable and its value, or None."""

    row: LauncherRow
    values: tuple[tuple[str, int] | None, ...]

    @property
    def complete(self) -> bool:
        return all(self.values)


def _is_torchrun(env: Environment) -> bool:
    return "TORCHELASTIC_RUN_ID" in env


def _is_hydra(env: Environment) -> bool:
    return "MPI_LOCALRANKID" in env


def _is_slurm_step(env: Environment) -> bool:
    """Returns whether srun started this process as a task.

    The shell of a batch script or of salloc has Slurm's variables too, but it is not a rank.
    """
    step = env.get("SLURM_STEP_ID", "batch")
    # -5 is the batch script's id, since Slurm 26.
    if step in ("batch", "interactive", "extern") or step.startswith("-"):
        return False
    return _number("SLURM_STEP_ID", step, digits=10) < _FIRST_SPECIAL_STEP


_FIRST_SPECIAL_STEP = 0xFFFF_FFF0  # slurm.h keeps the last numbers for batch, interactive and extern steps

_PLAIN = (("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_MPI_OR_SLURM = frozenset({"Open MPI", "MPICH", "horovodrun", "Slurm", "PMI-2", "PMIx"})

ROWS = (
    # A supervisor sets these for its rank, if the world is another than the one that the launcher made.
    LauncherRow(
        SUPERVISOR,
        (("CLIPSHIP_RANK",), ("CLIPSHIP_RANKS",), ("CLIPSHIP_LOCAL_RANK",), ("CLIPSHIP_LOCAL_SIZE",)),
        around=None,
    ),
    LauncherRow("clipship run", _PLAIN, _MPI_OR_SLURM, lambda env: STARTED_HERE in env),
    LauncherRow("torchrun", _PLAIN, _MPI_OR_SLURM, _is_torchrun),
    LauncherRow(
        "Open MPI",
        (
            ("OMPI_COMM_WORLD_RANK",),
            ("OMPI_COMM_WORLD_SIZE",),
            ("OMPI_COMM_WORLD_LOCAL_RANK",),
            ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ),
        around=frozenset({"Slurm", "PMI-2"}),
    ),
    LauncherRow(
        "MPICH",  # Hydra, which Intel MPI uses too
        (("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
        around=frozenset({"Slurm", "PMIx"}),
        applies=_is_hydra,
    ),
    LauncherRow(
        "horovodrun",
        (("HOROVOD_RANK",), ("HOROVOD_SIZE",), ("HOROVOD_LOCAL_RANK",), ("HOROVOD_LOCAL_SIZE",)),
        around=frozenset({"Slurm", "PMI-2", "PMIx"}),
    ),
    LauncherRow(
        "Slurm",
        (
            ("SLURM_PROCID",),
            ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
            ("SLURM_LOCALID",),
            ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        ),
        applies=_is_slurm_step,
    ),
    # `srun --mpi=pmi2` sets these.
    LauncherRow("PMI-2", (("PMI_RANK",), ("PMI_SIZE",), (), ()), applies=lambda env: not _is_hydra(env)),
    LauncherRow("PMIx", (("PMIX_RANK",), (), (), ())),  # srun --mpi=pmix, and Open MPI
    LauncherRow(
        "environment",  # set by hand, or by a batch script
        _PLAIN,
        applies=lambda env: not _is_torchrun(env),
    ),
)


def detect(env: Environment, hostname: str) -> World:
    """Returns the world that the launcher's variables describe; a single process if there are none.

    Raises InputError, which names variables and values, if they are not numbers, are incomplete, are out of
    range, contradict each other, or differ from the size that `CLIPSHIP_WORLD_SIZE` expects.
    """
    claims = [claim for row in ROWS if (claim := _claim(row, env)) is not None]
    chosen = next((claim for claim in claims if claim.complete), None)
    if chosen is None:
        _refuse_incomplete(claims)
        world = World(0, 1, 0, 1, hostname, SINGLE)
    else:
        for other in claims:
            _check_agreement(chosen, other)
        world = _world(chosen, hostname)
        _check_one_part(world, env)
        if chosen.row.launcher == SUPERVISOR:
            world = _under_launcher(world, [claim for claim in claims if claim is not chosen])
    _check_expected_size(world, env)
    return replace(
        world,
        node=env.get(NODE, hostname),
        generation=_number(GENERATION, env.get(GENERATION, "1")),
        submission=env.get(SUBMISSION, ""),
    )


def first_world(member: World, env: Environment) -> World | None:
    """Returns the place of a supervisor's rank in the first generation; None if it has no rank.

    `member` is the supervisor's place among all supervisors, as `detect` gives it. A supervisor of a spare
    node has no rank, nor has one that takes the place of a killed one. Raises InputError if
    CLIPSHIP_SPARE_NODES leaves no rank.
    """
    spares = number_of_spares(member, env)
    if spares >= member.size:
        raise InputError(
            f"{SPARE_NODES}={env[SPARE_NODES]} leaves no rank: {member.launcher} started "
            f"{many(member.size, 'supervisor')}, {member.local_size} on each node"
        )
    if env.get(RESPAWNED) or member.rank >= member.size - spares:
        return None
    return replace(member, size=member.size - spares)


def number_of_spares(member: World, env: Environment) -> int:
    """Returns how many supervisors have no rank in the first generation. Raises InputError."""
    return _number(SPARE_NODES, env.get(SPARE_NODES, "0")) * member.local_size


def cross_of(world: World) -> tuple[int, int]:
    """Returns Horovod's rank and size across nodes in a world whose nodes all have as many ranks."""
    return world.rank // world.local_size, world.size // world.local_size


def rank_variables(world: World, cross: tuple[int, int], env: Environment) -> dict[str, str]:
    """Returns the variables that give a rank its place in a world which its launcher did not make.

    `cross` is Horovod's: the node's number among those that have this local rank, and their number. `env` is
    the supervisor's own environment.
    """
    place = (world.rank, world.size, world.local_rank, world.local_size)
    names = ("CLIPSHIP_RANK", "CLIPSHIP_RANKS", "CLIPSHIP_LOCAL_RANK", "CLIPSHIP_LOCAL_SIZE")
    variables = dict(zip(names, map(str, place), strict=True))
    if EXPECTED_SIZE in env:
        variables[EXPECTED_SIZE] = str(world.size)
    return variables | dict(zip(CROSS, map(str, cross), strict=True))


def device_index(world: World, visible: int) -> int | None:
    """Returns the index of this rank's device among the process's `visible` ones; None if there are none.

    A single visible device is taken as this rank's own: `shared_devices` checks whether another rank has it
    too. Raises InputError if the ranks of the node outnumber the devices.
    """
    if visible == 0:
        return None
    if visible == 1:
        return 0
    slot = world.local_rank if world.slot is None else world.slot
    if slot >= visible:
        raise InputError(
            f"rank {world.rank} has local rank {slot} on node {world.node}, "
            f"but only {many(visible, 'GPU')} are visible there, and two ranks cannot share a GPU: "
            f"start at most {many(visible, 'rank')} on that node"
        )
    return slot


def devices_given(env: Environment, row: Accelerator) -> str:
    """Returns `NAME=VALUE` of the variable by which a launcher gave this process GPUs; "" if there is none.

    A variable of `row.visible` decides if it is set. `all` comes from an image, not from a launcher.
    """
    names = [name for name in row.visible if name in env][:1] or [
        name for name in row.given_by if name in env
    ]
    given = [name for name in names if env[name].partition(",")[0].strip().lower() not in _NO_DEVICE]
    return f"{given[0]}={env[given[0]]}" if given else ""


# The last of these is what Slurm sets for a step without GPUs.
_NO_DEVICE = {"", "-1", "none", "void", "all", "nodevfiles"}


def shared_devices(records: Sequence[tuple[int, str, str | None]], variable: str) -> None:
    """Raises InputError if two of the gathered (rank, node, device UUID) share a device, a line each pair.

    A rank whose device has no UUID is left out. `variable` is the one that chooses a process's devices.
    """
    owners: dict[tuple[str, str | None], int] = {}
    problems = []
    for rank, node, device in sorted(record for record in records if record[2] is not None):
        owner = owners.setdefault((node, device), rank)
        if owner != rank:
            problems.append(f"ranks {owner} and {rank} on node {node} have the same GPU, {device}")
    if problems:
        raise InputError(
            "\n".join(
                [
                    *problems,
                    (
                        "start one rank for each GPU: start fewer ranks on each node, "
                        f"or give each rank its own device in {variable}"
                    ),
                ]
            )
        )


def master_address(env: Environment, world: World) -> tuple[str, int]:
    """Returns host and TCP port at which ranks meet without MPI: MASTER_ADDR and MASTER_PORT.

    A single process gets loopback and port 0, which means any free port. Raises InputError if several ranks
    have no such address: each would wait for the others on its own host.
    """
    if world.launcher == SINGLE:
        return "127.0.0.1", 0
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise InputError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, so the {world.size} "
            f"ranks that {world.launcher} started cannot find each other: `clipship run`, torchrun and "
            "Clipship's batch scripts set both variables; if you start ranks by hand, set them for every rank"
        )
    port = _number("MASTER_PORT", env["MASTER_PORT"])
    if not 1 <= port <= 65535:
        raise InputError(f"MASTER_PORT={port} is not a TCP port: use 1 to 65535")
    return env["MASTER_ADDR"], port


def _claim(row: LauncherRow, env: Environment) -> Claim | None:
    if not row.applies(env):
        return None
    names = [next((name for name in alternatives if name in env), None) for alternatives in row.variables]
    if not any(names):
        return None
    return Claim(row, tuple(None if name is None else (name, _value(name, env)) for name in names))


def _value(name: str, env: Environment) -> int:
    if name.endswith("TASKS_PER_NODE"):
        return _tasks_on_node(name, env[name], _number("SLURM_NODEID", env.get("SLURM_NODEID", "")))
    return _number(name, env[name])


def _number(name: str, text: str, digits: int = 9) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= digits):
        raise InputError(
            f"{name}={text!r} is not a whole number of 0 or more: "
            "start the ranks with a launcher that sets it, or unset it"
        )
    return int(text)


def _tasks_on_node(name: str, text: str, node_index: int) -> int:
    """Returns the number of tasks on this node. Slurm writes `4(x2),3` for nodes with 4, 4 and 3 tasks."""
    end = 0
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if match is None:
            raise InputError(f"{name}={text!r} is not a list of task counts, which Slurm writes like 4(x2),3")
        end += int(match[2] or 1)
        if node_index < end:
            return int(match[1])
    raise InputError(
        f"SLURM_NODEID={node_index} is beyond the {end} nodes of {name}={text!r}: start the ranks with srun"
    )


def _refuse_incomplete(claims: Sequence[Claim]) -> None:
    if not claims:
        return
    claim = claims[0]
    given = ", ".join(f"{name}={value}" for name, value in filter(None, claim.values))
    missing = [
        names[0]
        for names, value in zip(claim.row.variables, claim.values, strict=True)
        if names and value is None
    ]
    lacking = ", ".join(missing) if missing else "a variable with this process's local rank"
    several = "," in given
    raise InputError(
        f"{given} {'are' if several else 'is'} set without {lacking}: start ranks with torchrun, mpirun, "
        f"srun, horovodrun or `clipship run`, or unset {'them' if several else 'it'} for a single process"
    )


def _check_agreement(chosen: Claim, other: Claim) -> None:
    if chosen.row.around is None or other.row.launcher in chosen.row.around:
        return
    for ours, theirs in zip(chosen.values, other.values, strict=True):
        if ours and theirs and ours[1] != theirs[1]:
            raise InputError(
                f"{ours[0]}={ours[1]} ({chosen.row.launcher}) and "
                f"{theirs[0]}={theirs[1]} ({other.row.launcher}) contradict each other "
                "about this process: unset those of the launcher that you do not use, and let one launcher "
                "start the ranks"
            )


def _world(claim: Claim, hostname: str) -> World:
    rank, size, local_rank, local_size = (value for value in claim.values if value is not None)
    # Open MPI 5.0 tells every node the local size of the last one, so it only serves as a lower bound.
    if claim.row.launcher == "Open MPI":
        local_size = local_size[0], max(local_size[1], local_rank[1] + 1)
    for inner, outer in ((rank, size), (local_rank, local_size)):
        if inner[1] >= outer[1]:
            raise InputError(f"{inner[0]}={inner[1]} is not below {outer[0]}={outer[1]}: ranks count from 0")
    if local_size[1] > size[1]:
        raise InputError(
            f"{local_size[0]}={local_size[1]} is above {size[0]}={size[1]}: "
            "a node cannot have more ranks than the world"
        )
    return World(rank[1], size[1], local_rank[1], local_size[1], hostname, claim.row.launcher)


def _under_launcher(world: World, claims: Sequence[Claim]) -> World:
    """Returns the world that a supervisor gives its rank, with launcher and slot of the other claims."""
    launchers = next((claim for claim in claims if claim.complete), None)
    if launchers is None:
        return world
    slot = launchers.values[2]
    return replace(world, launcher=launchers.row.launcher, slot=slot[1] if slot else None)


def _check_one_part(world: World, env: Environment) -> None:
    """Raises InputError for a task of a heterogeneous job, whose parts each have numbers of their own."""
    parts = _number("SLURM_HET_SIZE", env.get("SLURM_HET_SIZE", "1"))
    if world.launcher == "Slurm" and parts > 1:
        raise InputError(
            f"SLURM_HET_SIZE={parts}: this is a task of a heterogeneous job, whose parts count their ranks "
            "apart: ask for nodes of one kind"
        )


def _check_expected_size(world: World, env: Environment) -> None:
    if EXPECTED_SIZE not in env:
        return
    expected = _number(EXPECTED_SIZE, env[EXPECTED_SIZE])
    if world.size != expected:
        raise InputError(
            f"{EXPECTED_SIZE}={expected}: a world of {many(expected, 'rank')} was expected, "
            f"but this process sees one of {world.size} ({world.launcher}): "
            "the launcher did not start all ranks as one world; nothing was trained"
        )
