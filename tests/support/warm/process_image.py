"""Sets what /proc shows of this process: a fork has the command line and environment of its parent."""

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14  # linux/prctl.h
_NO_FILE = 2**32 - 1
_KEPT: list[ctypes.Array[ctypes.c_char]] = []
_ADDRESSES = (
    "start_code end_code start_data end_data start_brk brk start_stack "
    "arg_start arg_end env_start env_end auxv"
)


class _Map(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in _ADDRESSES.split()),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Lets /proc/PID/cmdline and /proc/PID/environ show these.

    Raises OSError if the kernel cannot: one before Linux 3.18, or without CONFIG_CHECKPOINT_RESTORE.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    text = ctypes.create_string_buffer(words + variables)
    start, middle, end = (ctypes.addressof(text) + place for place in (0, len(words), len(words + variables)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # Numbers of proc(5), whose third field is the first after the name.
    code_start, code_end, data_start, data_end, brk_start, stack = (
        int(fields[number - 3]) for number in (26, 27, 45, 46, 47, 28)
    )
    image = _Map(
        code_start, code_end, data_start, data_end, brk_start, libc.sbrk(0), stack,
        start, middle, middle, end, 0, 0, _NO_FILE,
    )  # fmt: skip
    size = ctypes.c_ulong(ctypes.sizeof(image))
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(image), size, 0):
        raise OSError(ctypes.get_errno(), "the kernel keeps the command line as it is")
    _KEPT.append(text)
