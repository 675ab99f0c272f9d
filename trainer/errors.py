"""Exit codes, and the exceptions that lead to them, for both halves. Imports nothing of ours."""

from collections.abc import Callable, Iterable

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_PREEMPTED = 75
EXIT_START_AGAIN = 76
"""Code of supervisors that their launcher starts again at once, in the same start; no run ends with it."""
EXIT_LEFT_OUT = 77
"""Code of a pod that leaves a run which goes on without it; no run ends with it."""
EXIT_TIMED_OUT = 124
EXIT_INTERRUPTED = 130
_LONGEST_LINE, _SHOWN = 4000, 1500
"""Most characters of a line of a message, and those of its beginning and of its end that stay."""


class InputError(Exception):
    """The user's input cannot work: shown without a traceback, exit code 2.

    The text says what is wrong, what was given, what is allowed and what to do. Several problems found
    together are listed one per line. A line that a value from others makes too long loses its middle.
    """

    def __init__(self, *about: object) -> None:
        super().__init__(*(bounded(part) if isinstance(part, str) else part for part in about))


def bounded(text: str) -> str:
    """Returns the text with the middle of each line left out that is too long for a message."""
    return "\n".join(
        line
        if len(line) <= _LONGEST_LINE
        else f"{line[:_SHOWN]} ... ({len(line) - 2 * _SHOWN:,} more characters) ... {line[-_SHOWN:]}"
        for line in text.split("\n")
    )


class StorageError(InputError):
    """Storage does not answer, or has lost what it had, even after some waiting.

    Exit code 1, because a later start may succeed.
    """


class MachineError(Exception):
    """The machines cannot run the job as they are: shown without a traceback, exit code 1.

    The text names the node and the remedy.
    """


class UnfitNode(MachineError):
    """All ranks found that one node of several cannot train. A generation without that node may."""

    def __init__(self, text: str, node: str) -> None:
        super().__init__(text)
        self.node = node


class ClusterError(Exception):
    """A scheduler or another outside service cannot or will not do what was asked.

    It is shown without a traceback; the exit code is 1.
    """


class NoAnswer(ClusterError):
    """A scheduler was asked and did not answer in time. It may have done what was asked."""


class Preempted(Exception):
    """The run was asked to stop; what there was to save is saved, and the same command resumes it.

    Exit code 75, EX_TEMPFAIL.
    """


EncodedError = tuple[str, str]
"""Kind and text of an error, as one rank sends it to the others."""
_ENCODABLE: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (InputError, StorageError, MachineError, Preempted)
}


def encode_error(error: Exception | None) -> EncodedError | None:
    """Returns the error as values that can be sent to other ranks; None for no error."""
    if error is None:
        return None
    return next(kind.__name__ for kind in type(error).__mro__ if _ENCODABLE.get(kind.__name__) is kind), str(
        error
    )


def decode_error(encoded: EncodedError | None) -> Exception | None:
    """Returns the error that `encode_error` was given; None for no error."""
    return None if encoded is None else _ENCODABLE[encoded[0]](encoded[1])


def exit_code_of(problem: InputError) -> int:
    """Returns the exit code of a command that a problem ends: a full disk is no fault of the input."""
    return EXIT_FAILED if isinstance(problem, StorageError) else EXIT_BAD_INPUT


def raise_problems(problems: Iterable[str]) -> None:
    """Raises InputError with all lines of the problems, each once; nothing without any."""
    if lines := dict.fromkeys(line for text in problems for line in text.split("\n")):
        raise InputError("\n".join(lines))


def problems_of(checks: Iterable[Callable[[], object]]) -> list[str]:
    """Returns the message of each check that raises InputError, in their order."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except InputError as problem:
            problems.append(str(problem))
    return problems
