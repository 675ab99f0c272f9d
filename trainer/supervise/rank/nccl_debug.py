"""Asks NCCL and torch's NCCL backend about a hang: the flight recorder's dump, and NCCL's RAS service.

No torch. Both exist on GPUs only; without them nothing is returned and nothing fails. Tested against
stand-ins, not yet on GPUs.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from trainer.run.file_work import within

RAS_ADDRESS = ("localhost", 28028)
"""Default of NCCL_RAS_ADDR, NCCL >= 2.24.3."""
_RAS_S = 3.0
_DUMP_S = 2.0
_PIPE, _DUMP = "nccl-pipe-", "nccl-dump-"


def rank_variables(folder: Path) -> Mapping[str, str]:
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
            return await within(_DUMP_S, partial(_copied, dump, target))
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
