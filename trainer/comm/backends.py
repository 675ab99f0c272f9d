"""Table of communication backends: a row holds all that other modules need to know about one.

A backend is one module that implements `trainer.comm.protocol.Comm`, one row here, and its place in the table
of `trainer.comm.connect`. No other module compares a backend's name. Imports neither torch nor Horovod.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from trainer.comm.shard_degree import shard_degree
from trainer.config import Comm, Job, Timeouts
from trainer.config.optimizers import OPTIMIZERS
from trainer.config.stages import standard_input
from trainer.errors import InputError
from trainer.text.wording import many
from trainer.world.variables import MEETS

Launcher = Literal["clipship", "mpirun"]
"""Program that starts ranks: Clipship itself, srun or pods; or MPI's, which may also connect the ranks."""

BUCKET_MB = 25.0
"""MiB of gradients in one all-reduce of Horovod, unless the job says otherwise."""
_CPU_CYCLE_MS, _GPU_CYCLE_MS, _GPU_GLOO_CYCLE_MS = 5.0, 0.25, 1.0
"""Time between two rounds of Horovod: without GPUs, with them over MPI, and with them over Gloo.

A round is work for the cores: 0.25 ms of one on a CPU over Gloo. GPUs wait for rounds longer than they last.
"""
_GLOO_HOP_S = 30e-6
"""Time of a small message over TCP, of which Gloo's round takes many."""
_GLOO_RANKS = 32
"""Ranks of Horovod beyond which MPI connects them.

Over Gloo a round goes twice round a ring of all ranks, and at the start each rank asks rank 0 for the address
of each other: 256 ranks would wait 30 s for that.
"""
_PARAMETER_MB = 1.0
"""MiB of the gradient of a usual matrix, if each parameter's travels alone."""
_FSDP_BLOCK_MB = 27.0
"""MiB of the gradients of a block of ViT-B; FSDP reduces each block at once."""

_BYTES = {"none": 4, "fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of a value by the type in which it travels."""


def _horovod_limits(timeouts: Timeouts) -> dict[str, str]:
    """Returns variables by which Horovod warns early, and gives up after our supervisors would have.

    Horovod has no time limit on a collective.
    """
    backstop_s = str(math.ceil(timeouts.backstop_s))
    return {
        # This warning names the missing ranks.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, int(timeouts.step_s / 2))),
        # By default a stall never ends the run.
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": backstop_s,
        # Horovod's own 30 s would end a slow start, and any longer collective.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": backstop_s,
    }


def as_variables(settings: Mapping[str, str | int | float | None]) -> dict[str, str]:
    """Returns the settings that are set, as text; a bool becomes 1 or 0."""
    return {
        name: f"{value:g}"
        if isinstance(value, float)
        else str(int(value) if isinstance(value, bool) else value)
        for name, value in settings.items()
        if value is not None
    }


def horovods_cycle_ms(*, gpus: bool, over_mpi: bool) -> float:
    """Returns the time between two rounds of negotiation, for a job that does not say it."""
    if not gpus:
        return _CPU_CYCLE_MS
    return _GPU_CYCLE_MS if over_mpi else _GPU_GLOO_CYCLE_MS


class BackendRow(ABC):
    """One backend: what other modules need to know about it."""

    name: ClassVar[str]
    """Value of `comm.backend`."""
    library: ClassVar[str]
    """Python module of the library."""
    missing: ClassVar[str]
    """Advice at the end of the message that its library cannot be imported."""
    over_mpi: ClassVar[bool] = False
    """True if MPI connects the ranks that it has started; else they meet at MASTER_ADDR and MASTER_PORT."""
    splits_model: ClassVar[bool] = False
    """True if a rank holds only a part of the weights and of the optimizer's state, where there are several.

    Then no steps are kept in memory: restarts go on from the newest checkpoint on disk.
    """

    def launcher_here(self, job: Job) -> Launcher:
        """Returns the choice of `comm.launcher = "auto"` on one host."""
        return "clipship"

    def launcher_on_hosts(self, job: Job, ranks: int) -> Launcher:
        """Returns the choice of `comm.launcher = "auto"` for so many ranks on several hosts."""
        return "clipship"

    def bound_to(self, comm: Comm) -> tuple[str, Launcher] | None:
        """Returns a setting that works with one launcher alone, as "key = value", and that launcher."""
        return None

    @abstractmethod
    def environment(self, job: Job) -> Mapping[str, str]:
        """Returns variables of a rank that this backend reads."""

    @abstractmethod
    def reduced_mb(self, comm: Comm) -> float:
        """Returns the MiB of gradients that travel in one all-reduce."""

    @abstractmethod
    def gradient_bytes(self, comm: Comm) -> int:
        """Returns the bytes of one value of a gradient that travels."""

    def negotiation_s(self, job: Job, ranks: int, nodes: int, hop_s: float) -> float:
        """Returns the seconds in which ranks with GPUs find out, before a collective, that all are ready.

        0: they do not ask. `hop_s` is the time of a hop between nodes.
        """
        return 0.0

    def problem(self, job: Job, ranks: int) -> str:
        """Returns why other keys of a job, or its number of ranks, exclude this backend; "" if not."""
        return ""


class _Torch(BackendRow):
    name = "torch"
    library = "torch"
    missing = "`pip install torch` brings it"

    def environment(self, job: Job) -> dict[str, str]:
        """Returns variables by which NCCL's watchdogs act after ours, and leave a flight record.

        Without GPUs torch reads none of these.
        """
        heartbeat_s = math.ceil(job.timeouts.backstop_s) + 60
        return {
            # A failed collective ends the process; 1 would abort work that the flight record needs.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
            # torch's own 480 s could kill a rank within a longer phase.
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(heartbeat_s),
            # torch before 2.9 does not dump unless asked.
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            # Collectives that the flight recorder remembers; the default of old versions is 0.
            "TORCH_FR_BUFFER_SIZE": "2000",
        }

    def reduced_mb(self, comm: Comm) -> float:
        return comm.torch.bucket_mb

    def gradient_bytes(self, comm: Comm) -> int:
        return _BYTES[comm.torch.compression]


class _Fsdp(_Torch):
    name = "fsdp"
    splits_model = True

    def reduced_mb(self, comm: Comm) -> float:
        return _FSDP_BLOCK_MB

    def gradient_bytes(self, comm: Comm) -> int:
        return _BYTES[comm.fsdp.reduce_dtype]

    def problem(self, job: Job, ranks: int) -> str:
        if job.comm.find_unused_parameters:
            return (
                "comm.find_unused_parameters = true is not possible with comm.backend = fsdp, whose ranks "
                "must all use the same parameters in a step: leave it out, or use comm.backend = torch"
            )
        if ranks > 1 and not OPTIMIZERS[job.optim.optimizer].elementwise:
            return (
                f'optim.optimizer = "{job.optim.optimizer}" looks at whole parameters, of which a rank has a '
                "part with comm.backend = fsdp: use comm.backend = torch, or another optimizer"
            )
        if job.model.cuda_graphs:
            return (
                "model.cuda_graphs = true is not possible with comm.backend = fsdp, which gathers parameters "
                "anew for each pass: leave it out, or use comm.backend = torch"
            )
        try:
            if ranks > 1:
                shard_degree(job.comm.fsdp.shard_degree, [""] * ranks)
        except InputError as problem:
            return str(problem)
        return ""


class _Horovod(BackendRow):
    name = "horovod"
    library = "horovod"
    missing = "`make horovod` builds it, or use backend = torch"
    over_mpi = True

    def launcher_here(self, job: Job) -> Launcher:
        bound = self.bound_to(job.comm)
        return bound[1] if bound else "clipship"

    def launcher_on_hosts(self, job: Job, ranks: int) -> Launcher:
        """MPI ends all ranks when one is gone, which a job that restarts its ranks would rather not have."""
        if bound := self.bound_to(job.comm):
            return bound[1]
        return "clipship" if job.recovery.max_restarts > 0 and ranks <= _GLOO_RANKS else "mpirun"

    def bound_to(self, comm: Comm) -> tuple[str, Launcher] | None:
        carrier = comm.horovod.cpu_operations
        launcher: Launcher = "mpirun" if carrier == "mpi" else "clipship"
        return None if carrier is None else (f"comm.horovod.cpu_operations = {carrier}", launcher)

    def environment(self, job: Job) -> dict[str, str]:
        horovod = job.comm.horovod
        settings = as_variables(
            {
                # What travels together is in one tensor already: Horovod would only copy it, through another
                # buffer, there and back.
                "HOROVOD_FUSION_THRESHOLD": 0,
                "HOROVOD_CYCLE_TIME": horovod.cycle_ms,
                "HOROVOD_HIERARCHICAL_ALLREDUCE": horovod.hierarchical_allreduce,
                "HOROVOD_HIERARCHICAL_ALLGATHER": horovod.hierarchical_allgather,
                "HOROVOD_CPU_OPERATIONS": horovod.cpu_operations,
                # off until the trainer starts it
                "HOROVOD_TIMELINE": "DYNAMIC" if job.comm.timeline else None,
            }
        )
        return settings | _horovod_limits(job.timeouts)

    def reduced_mb(self, comm: Comm) -> float:
        fused_mb = comm.horovod.fusion_mb
        return max(_PARAMETER_MB, BUCKET_MB if fused_mb is None else fused_mb)

    def gradient_bytes(self, comm: Comm) -> int:
        return _BYTES[comm.horovod.compression]

    def negotiation_s(self, job: Job, ranks: int, nodes: int, hop_s: float) -> float:
        """Returns half the time between two rounds, which is the mean wait for the next one, and a round.

        A round is an all-reduce of a few bytes: MPI's goes up and down a tree of nodes, Gloo's twice round a
        ring of all ranks. The next one begins no earlier than it ends.
        """
        chosen = job.comm.launcher
        if chosen == "auto":
            chosen = self.launcher_on_hosts(job, ranks) if nodes > 1 else self.launcher_here(job)
        over_mpi = chosen == "mpirun"
        hops = 2 * math.ceil(math.log2(nodes)) + 1 if over_mpi else 2 * (ranks - 1)
        round_s = hops * (hop_s if over_mpi else max(hop_s, _GLOO_HOP_S))
        cycle_s = (job.comm.horovod.cycle_ms or horovods_cycle_ms(gpus=True, over_mpi=over_mpi)) / 1e3
        return max(cycle_s, round_s) / 2 + round_s


BACKENDS: dict[str, BackendRow] = {row.name: row for row in (_Torch(), _Fsdp(), _Horovod())}
"""Rows by the value of `comm.backend`."""


def check_restarts(job: Job, launcher: Launcher, *, starts_again: bool = True) -> None:
    """Raises InputError if the job asks for restarts and its ranks cannot be started again.

    `launcher` starts the ranks, as `launcher_for` gives it. `starts_again` says whether it can start all
    supervisors again, as our own commands and scripts can. Samples that can be read only once allow no
    restart.
    """
    if not job.recovery.max_restarts:
        return
    key = f"recovery.max_restarts = {job.recovery.max_restarts}"
    if over_mpi(job, launcher) and not starts_again:
        raise InputError(
            f"{key} needs ranks that can be started again, but MPI, which connects those of "
            f"comm.backend = {job.comm.backend}, ends the whole run when one of its ranks is gone, and "
            "nothing is there to start all again: set it to 0, use `clipship run`, or comm.backend = torch"
        )
    if reads := standard_input(job):
        raise InputError(
            f"{key}: ranks that are started again would need all of {reads}, and "
            "standard input can be read only once: set it to 0, or name files"
        )


def keeps_in_memory(job: Job) -> bool:
    """Returns whether the ranks of this job keep their steps in the memory of their nodes."""
    return asks_for_memory(job) and not row_of(job).splits_model


def asks_for_memory(job: Job) -> bool:
    """Returns whether the job asks for steps in memory, which its backend may not be able to keep."""
    return job.recovery.max_restarts > 0 and job.recovery.keep_in_memory


def disk_only(job: Job) -> str:
    """Returns a sentence for a job that asks for steps in memory, whose backend cannot keep them."""
    return (
        f"with comm.backend = {row_of(job).name} no step is kept in memory: "
        "restarts go on from the newest checkpoint"
    )


def check_backend(job: Job, ranks: int) -> None:
    """Raises InputError if other keys of the job, or the number of ranks, exclude its backend."""
    if problem := row_of(job).problem(job, ranks):
        raise InputError(problem)


def check_lost_nodes(job: Job, launcher: str, *, keeps_going: bool) -> None:
    """Raises InputError if the job counts on going on without a node, and its launcher ends all then.

    MPI does, and the launcher starts all again on the same nodes.
    """
    nodes = [name for name in ("spare_nodes", "min_nodes") if getattr(job.recovery, name)]
    if nodes and not keeps_going:
        raise InputError(
            f"recovery.{nodes[0]} = {getattr(job.recovery, nodes[0])} is of no use for ranks that connect or "
            f"start over MPI ({launcher}): MPI ends all when one is gone, and they start again on the same "
            f"nodes: {_instead(job)}"
        )


def _instead(job: Job) -> str:
    """Returns advice for a job whose ranks MPI would connect or start."""
    return "leave it out" + (', or set comm.launcher = "clipship"' if row_of(job).over_mpi else "")


def starts_again(job: Job, launcher: Launcher) -> Literal["", "lost", "always"]:
    """Returns when the launcher must start all supervisors again, for STARTS_AGAIN.

    Only MPI needs that.
    """
    if not job.recovery.max_restarts or launcher != "mpirun":
        return ""
    return "always" if over_mpi(job, launcher) else "lost"


def launcher_for(job: Job, *, several_hosts: bool, ranks: int | None = None) -> Launcher:
    """Returns the launcher that comm.launcher means for so many ranks; None takes those of [resources].

    Raises InputError if another key needs another one.
    """
    row, launcher = row_of(job), job.comm.launcher
    if launcher == "auto":
        return (
            row.launcher_on_hosts(job, ranks or job.resources.world_size)
            if several_hosts
            else row.launcher_here(job)
        )
    if (bound := row.bound_to(job.comm)) and bound[1] != launcher:
        raise InputError(
            f"{bound[0]} needs comm.launcher = {bound[1]}, but it is {launcher}: change one of them, or "
            "leave one out"
        )
    return launcher


def connection(job: Job, launcher: Launcher) -> str:
    """Returns what connects the job's ranks under this launcher, "" if the backend has one way only."""
    return "" if not row_of(job).over_mpi else "MPI" if over_mpi(job, launcher) else "Gloo"


def over_mpi(job: Job, launcher: Launcher) -> bool:
    """Returns whether MPI connects the job's ranks under this launcher; else they meet at MASTER_ADDR."""
    return launcher == "mpirun" and row_of(job).over_mpi


def meeting_variables(job: Job, launcher: Launcher) -> Mapping[str, str]:
    """Returns the variable that tells a rank to meet the others without MPI, which could connect it."""
    return {MEETS: "1"} if row_of(job).over_mpi and not over_mpi(job, launcher) else {}


def many_without_mpi(job: Job, launcher: Launcher) -> Iterator[str]:
    """Yields a sentence if MPI could connect the job's ranks, which are many for what else does."""
    ranks = job.resources.world_size
    if meeting_variables(job, launcher) and ranks > _GLOO_RANKS:
        yield (
            f"Gloo connects {many(ranks, 'rank')} of comm.backend = {job.comm.backend}: it is slow beyond "
            f"{_GLOO_RANKS}; "
            'MPI, which comm.launcher = "mpirun" chooses, is not, but ends all when one is gone'
        )


def launcher_of(env: Mapping[str, str]) -> Launcher:
    """Returns the launcher of ranks that MPI may connect, from a rank's environment.

    Those of Horovod's own horovodrun meet at its server; they count as MPI's, for it ends all, too.
    """
    return "clipship" if MEETS in env else "mpirun"


def row_of(job: Job) -> BackendRow:
    """Returns the row of the job's backend."""
    return BACKENDS[job.comm.backend]
