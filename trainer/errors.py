"""Exit codes, and the exceptions that mean one. Imports nothing, so that both halves can use it."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_PREEMPTED = 75
EXIT_TIMED_OUT = 124


class InputError(Exception):
    """What the user gave cannot work: shown without a traceback, exit code 2.

    The text says what is wrong, what was given, what is allowed and what to do. Several problems found together stand one a line.
    """


class Unreadable(InputError):
    """Storage that does not answer, or has no longer what it had, also after some waiting: exit code 1, for a later start may go on."""


class Unfit(Exception):
    """The machines cannot run the job as they are: shown without a traceback, exit code 1. The text names node and remedy."""


class ClusterError(Exception):
    """A scheduler, or another service outside of the run, cannot or will not: shown without a traceback, exit code 1."""


class Preempted(Exception):
    """Somebody asked the run to stop; its state is saved, and the same command goes on from there. Exit code 75, EX_TEMPFAIL."""
