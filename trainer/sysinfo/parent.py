"""Child processes that end when the process that asked for them is gone, even if it was killed."""

import ctypes
import os
import sys
import threading

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def signal_with_parent(number: int) -> None:
    """Makes the kernel send this process the signal when its parent ends; runs in the child before exec.

    The kernel's parent is the process that forked this one. On other systems than Linux it does nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_with_parent() -> None:
    """Ends this process, at once, when the process is gone for which multiprocessing started it.

    The server that forks processes cannot see to that: each of them keeps a pipe open that keeps the server
    alive, and the server is their parent for the kernel, so after SIGKILL they would all stay for ever.
    """
    threading.Thread(target=_wait, name="end with the parent", daemon=True).start()


def _wait() -> None:
    import multiprocessing  # loaded already; supervisors, which start at once, do without it

    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
