"""Child processes that end when the process that asked for them is gone, even if it was killed."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Ends this process, at once, when the process is gone for which multiprocessing started it.

    The server that forks processes cannot see to that: each of them keeps a pipe open that keeps the server
    alive, and the server is their parent for the kernel, so after SIGKILL they would all stay for ever.
    """
    threading.Thread(target=_wait, name="end with the parent", daemon=True).start()


def _wait() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
