"""Reports what one rank does, seen from outside: its heartbeat, the kernel's /proc (Linux), its Python stack.

No torch. A rank that is stopped or asleep in the kernel cannot answer for itself: /proc then shows that, and
there is no stack. On GPUs it also asks torch's flight recorder and NCCL's RAS service; without them it has
nothing from there, and nothing fails. Those two are tested against stand-ins, not yet on GPUs.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.run.file_work import THREADS
from trainer.sysinfo.topology import file_text
from trainer.world.heartbeat import RankState

STACK_FILE = "stack"
"""File in the rank's folder; it exists once the rank can be asked for its stack."""
STACK_SIGNAL = signal.SIGUSR1
STACK_WAIT_S = 2.0
_STACK_BYTES = 6000
STOPPED_S = 3.0
"""Seconds for which a rank must be seen stopped: whoever suspends a whole run stops ranks a moment before
their supervisors, or wakes them a moment later."""
RAS_ADDRESS = ("localhost", 28028)
"""Default of NCCL_RAS_ADDR, NCCL >= 2.24.3."""
_RAS_S = 3.0
_DUMP_S = 2.0
_PIPE, _DUMP = "nccl-pipe-", "nccl-dump-"
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel, waiting for a device or a file system",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
}


@dataclass(frozen=True)
class RankReport:
    """State of one rank at one moment."""

    rank: int
    node: str
    pid: int
    phase: str
    step: int
    phase_s: float
    limit_s: float
    collectives: int
    collective: str
    waiting: bool
    state: str
    """State of the process as the kernel reports it, in words."""
    kernel: str
    """Kernel function in which the process sleeps; "" if it does not sleep or the kernel does not show it."""
    stack: str = ""
    """Python's stack of each thread, or the reason why there is none."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def report(rank: int, node: str, pid: int, state: RankState, stack: str = "") -> RankReport:
    """Returns the rank's state now; reads /proc."""
    return RankReport(
        rank=rank,
        node=node,
        pid=pid,
        phase=state.phase,
        step=state.step,
        phase_s=round(state.seconds, 1),
        limit_s=state.limit_s if state.limit_s != float("inf") else 0.0,
        collectives=state.collectives,
        collective=state.collective,
        waiting=state.waiting,
        state=state_of(pid),
        kernel=_read(pid, "wchan").strip("0"),
        stack=stack,
    )


def state_of(pid: int) -> str:
    """Returns the process's state, such as `running` or `stopped by a signal`.

    Returns `gone` if there is no such process.
    """
    letter = _read(pid, "stat").rpartition(")")[2].strip()[:1]
    return _STATES.get(letter, letter or "gone")


def is_stopped(pid: int) -> bool:
    """Returns whether a signal has stopped the process; one that a debugger has stopped does not count."""
    return state_of(pid) == _STATES["T"]


async def python_stack(pid: int, folder: Path) -> str:
    """Returns the process's Python stacks, or why there are none.

    It signals the process, which writes them into its folder, and waits STACK_WAIT_S at most. The rank may
    end and its folder go at any time: the next generation does not wait for this.
    """
    try:
        return await _asked_stack(pid, folder)
    except OSError:
        return "no Python stack: the process has ended"


async def _asked_stack(pid: int, folder: Path) -> str:
    state = state_of(pid)
    if not (folder / STACK_FILE).exists():
        return "no Python stack: the process has not started Python yet"
    if state not in ("running", "sleeping"):
        return f"no Python stack: the process is {state}"
    before = (folder / STACK_FILE).stat().st_size
    os.kill(pid, STACK_SIGNAL)
    return (
        await _written(folder / STACK_FILE, before)
        or f"no Python stack: the process did not answer within {STACK_WAIT_S:g} s"
    )


async def _written(path: Path, before: int) -> str:
    """Returns the text after the first `before` bytes, once the file no longer grows."""
    size = before
    for _ in range(int(STACK_WAIT_S / 0.1)):
        await asyncio.sleep(0.1)
        now = path.stat().st_size
        if now == size > before:
            break
        size = now
    return path.read_bytes()[before : before + _STACK_BYTES].decode(errors="replace").strip()


def _read(pid: int, name: str) -> str:
    return file_text(Path(f"/proc/{pid}/{name}"))


class StoppedRank:
    """Measures for how long one process after the other has been stopped (SIGSTOP)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._pid = 0
        self._since = 0.0

    def forget(self) -> None:
        """Begins anew: this process was suspended itself, so what it has seen before says nothing."""
        self._pid = 0

    def is_lasting(self, pid: int, *, is_stopped: bool) -> bool:
        """Returns whether each call for STOPPED_S has said that this process is stopped."""
        if not is_stopped:
            self._pid = 0
            return False
        if self._pid != pid:
            self._pid, self._since = pid, self._clock()
        return self._clock() - self._since >= STOPPED_S


def report_variables(folder: Path) -> Mapping[str, str]:
    """Returns the variables that say where torch's flight recorder listens and where it writes.

    torch appends the rank's number to both paths.
    """
    return {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / _PIPE),
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / _DUMP),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / _DUMP),  # name before torch 2.9
    }


async def flight_record(folder: Path, target: Path) -> Path | None:
    """Asks the rank for its flight record and copies it into the folder `target`; returns its path.

    Returns None if there is no recorder, or if it does not answer.
    """
    pipe = next(folder.glob(f"{_PIPE}*"), None)
    if pipe is None:
        return None
    with suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, b"1\n")
        os.close(descriptor)
    for _ in range(int(_DUMP_S / 0.2)):
        await asyncio.sleep(0.2)
        if dump := next(folder.glob(f"{_DUMP}*"), None):
            return await THREADS.within(_DUMP_S, partial(_copied, dump, target))
    return None


def _copied(dump: Path, target: Path) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    (target / dump.name).write_bytes(dump.read_bytes())
    return target / dump.name


async def ras_status(address: tuple[str, int] = RAS_ADDRESS) -> str:
    """Returns NCCL's own view of all communicators of the run; "" if nothing answers."""
    answer = b""
    with suppress(OSError):  # TimeoutError is one
        async with asyncio.timeout(_RAS_S):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"verbose status\n")
            try:
                while chunk := await reader.read(65536):
                    answer += chunk
            finally:
                writer.close()
    return answer.decode(errors="replace")
