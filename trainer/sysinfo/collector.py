"""Turns Python's garbage collector off and on, which is of no use while a process imports its modules.

What a rank imports is 440,000 objects that stay. The collector would scan them again and again: a fifth of
the time of these imports. No torch.
"""

import gc


def begin_without() -> None:
    """Turns the collector off until `collect_from_here`."""
    gc.disable()


def collect_from_here() -> None:
    """Turns the collector on for objects that are made from now on; those of now stay as long as the process.

    So no collection stops a rank to scan what it has imported, nor writes to memory that forks share.
    """
    gc.freeze()
    gc.enable()
