"""Signals as a process of ours wants them where it begins, whatever the one that started it did with them.

What a process ignores or blocks stays so across exec. With SIGCHLD ignored, the kernel forgets the exit codes
of children, and Python then takes each of them for 0.
"""

import signal

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
"""Signals that a supervisor takes as a request to stop the run."""
_requests: list[int] = []
_OURS = (signal.SIGCHLD, signal.SIGTERM)
"""SIGINT and SIGHUP stay ignored where a shell's `&` and nohup want that, SIGUSR1 and SIGUSR2 where a batch
script does: a process that takes them installs a handler, and any other would die of them.
"""


def signal_name(number: int) -> str:
    """Returns how messages name a signal: `SIGKILL`, or `signal 35` for one of the many without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def reset_inherited_signals(*, asks: bool = True) -> None:
    """Unblocks all signals, and lets the children's ends and requests to stop have their effect again.

    Without `asks`, requests to stop stay ignored: a rank gets them through its supervisor.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in _OURS if asks else _OURS[:1]:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def collect_requests() -> list[int]:
    """Collects requests to stop from now on; returns all of this process so far, to which they are added.

    A supervisor calls it before it imports all that it needs, which takes a while: a request that comes
    meanwhile would end it, and its launcher would start it again.
    """
    for number in SIGNALS:
        signal.signal(number, lambda caught, _frame: _requests.append(caught))
    return _requests
