"""A warm interpreter: `python -P -m tests.support.warm.server CHANNEL` imports what ranks import, and forks.

Each process that it forks leaves an untouched copy of the warm interpreter beside itself, for the processes
that it starts in turn. So each begins as a new interpreter would, but for the modules that are loaded.
"""

import fcntl
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from tests.support.warm import begin, client, process_image
from tests.support.warm.request import Request
from trainer.sysinfo import forks
from trainer.sysinfo.parent import signal_with_parent

READY = b"ready"
_MODULES = (
    "trainer.train.main",
    "trainer.comm.torch_backend",
    "trainer.comm.horovod_backend",
    "trainer.evaluate.rank",
    "trainer.launch.local",
    "trainer.launch.ranks.localrun",
    "trainer.preflight.rank",
    "trainer.supervise.main",
    "PIL.PngImagePlugin",
    "PIL.JpegImagePlugin",
)
_RUN = ("trainer.evaluate.rank", "trainer.preflight.rank")
"""Those of them that a rank runs, of which it has to be the first import."""
_MESSAGE_BYTES = 1 << 20
_DESCRIPTORS = 250
_ADOPTED_S = 10.0
_POLL_S = 0.0002


def main(channel: socket.socket) -> None:
    """Serves; what follows runs in the new processes alone, each of which becomes its module's."""
    env = dict(os.environ)
    path = [folder for folder in sys.path if folder not in env["PYTHONPATH"].split(os.pathsep)]
    _import_all()
    if problem := _problem():
        channel.send(problem.encode())
        os._exit(1)
    channel.send(READY)
    request, descriptors = _serve(channel, os.getppid())
    while request.starts_others:
        owner = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if forks.fork():
            theirs.close()
            client.use(client.Warm(_far(ours), env))
            break
        _be_copy(owner, [ours.detach(), *descriptors])
        request, descriptors = _serve(theirs, owner)
    begin.take(request, descriptors, path)
    begin.run(request)


def _import_all() -> None:
    from tests.support.jobs import tiny_job
    from trainer.model.light_import import import_open_clip

    import_open_clip(tiny_job())
    for name in _MODULES:
        with suppress(ImportError):  # Horovod, where it is not installed
            importlib.import_module(name)
    for name in _RUN:
        del sys.modules[name]
    gc.collect()
    gc.freeze()


def _problem() -> str:
    """Returns why this process cannot serve; empty if it can."""
    if not forks.can_fork():
        return "a library has started a thread"
    try:
        process_image.show(sys.orig_argv, os.environ)
    except OSError as error:
        return str(error)
    return ""


def _serve(channel: socket.socket, owner: int) -> tuple[Request, list[int]]:
    """Forks at each request of the process `owner`, and ends with it; returns in the new processes alone.

    The owner adopts orphans as long as it waits, so that the new process becomes its child.
    """
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, _DESCRIPTORS)
        if not message:
            os._exit(0)
        if middle := forks.fork():
            for number in descriptors:
                os.close(number)
            os.waitpid(middle, 0)
            continue
        if forks.fork():
            os._exit(0)
        try:
            _await_adoption(owner)
            request: Request = pickle.loads(message)
            request.join_group()
            channel.send(str(os.getpid()).encode())
            channel.close()
            return request, descriptors
        except BaseException:
            os._exit(1)


def _far(channel: socket.socket) -> socket.socket:
    with channel:
        return socket.socket(fileno=fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, begin.HIGH))


def _await_adoption(owner: int) -> None:
    limit = time.monotonic() + _ADOPTED_S
    while os.getppid() != owner:
        if time.monotonic() > limit:
            os._exit(1)
        time.sleep(_POLL_S)


def _be_copy(owner: int, descriptors: Sequence[int]) -> None:
    """Makes this process a copy that serves the process `owner`, and has nothing else of it."""
    signal_with_parent(signal.SIGKILL)
    if os.getppid() != owner:
        os._exit(0)
    for number in descriptors:
        os.close(number)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # it ends with its owner
    main(socket.socket(fileno=int(sys.argv[1])))
