"""A clock that is set back by two hours when a file is made, for all processes that are told of it."""

import subprocess
from pathlib import Path

SET = "CLOCK_BACK"
"""Variable with the file: when it is there, the clock is set back."""
_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    const char *file = getenv("CLOCK_BACK");
    if (clock == CLOCK_REALTIME && file && access(file, F_OK) == 0) now->tv_sec -= 7200;
    return code;
}
"""


def variables(folder: Path) -> dict[str, str]:
    """Compiles what stands between a process and its clock; returns the variables that put it there."""
    library = folder / "clock_back.so"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=_SOURCE, text=True, check=True)
    return {"LD_PRELOAD": str(library), SET: str(folder / "clock-is-back")}
