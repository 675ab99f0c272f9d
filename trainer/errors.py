"""The one error that bad input raises. Imports nothing, so that both halves can use it."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


class InputError(Exception):
    """What the user gave cannot work: shown without a traceback, exit code 2.

    The text says what is wrong, what was given, what is allowed and what to do. Several problems found together stand one a line.
    """
