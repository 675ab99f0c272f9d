"""Reports what one rank does, seen from outside: its heartbeat, the kernel's /proc (Linux), its Python stack.

No torch. A rank that is stopped or asleep in the kernel cannot answer for itself: /proc then shows that, and
there is no stack.
"""

import asyncio
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.world.heartbeat import RankState

STACK_FILE = "stack"
"""File in the rank's folder; it exists once the rank can be asked for its stack."""
STACK_SIGNAL = signal.SIGUSR1
STACK_WAIT_S = 2.0
_STACK_BYTES = 6000
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
        kernel=_read(pid, "wchan").strip("0\n"),
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
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
