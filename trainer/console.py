"""How a rank speaks to people and how it leaves: the same for training and for evaluation. No torch."""

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, TextIO

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, InputError, Preempted, Unfit, Unreadable
from trainer.exits import ExitRecord, record_exit
from trainer.health import memory
from trainer.health.pulse import RANK_DIR, Pulse
from trainer.world import World, detect

log = logging.getLogger("clipship")


def run_rank(stream: TextIO, work: Callable[[World, Pulse], None]) -> int:
    """Find out who this rank is, speak on the stream, work; returns 0. Any other end leaves the process here, its reason recorded."""
    pulse = Pulse.open(os.environ)
    try:
        world = detect(os.environ, os.uname().nodename)
    except InputError as error:
        print(f"clipship: {error}", file=sys.stderr)
        leave_now(EXIT_BAD_INPUT)
    speak(world, stream)
    try:
        work(world, pulse)
    except Preempted as error:
        log.info("%-12s %s", "preempted", error)
        _leave(world, EXIT_PREEMPTED, str(error))
    except (InputError, Unfit) as error:
        _refuse(world, pulse, error)
    except Exception as error:
        _fail(world, error)
    return EXIT_DONE


def speak(world: World, stream: TextIO) -> None:
    """Rank 0's log goes to the stream; of the others only errors do, to stderr. Log files, opened later, have all of it."""
    handler = logging.StreamHandler(stream if world.rank == 0 else sys.stderr)
    handler.setLevel(logging.INFO if world.rank == 0 else logging.ERROR)
    handler.addFilter(lambda record: record.name == "clipship" or record.levelno >= logging.WARNING)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a log file on a full disk would print a traceback for every line


def leave_now(exit_code: int) -> NoReturn:
    """End the process without the interpreter's clean-up, which may wait for other ranks, or abort on a library's threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _refuse(world: World, pulse: Pulse, error: InputError | Unfit) -> NoReturn:
    """In init all ranks find the same, and one says it; later one rank's data may be wrong. Supervisors say it themselves."""
    if RANK_DIR not in os.environ and world.rank == 0:
        print(f"clipship: {error}", file=sys.stderr)
    elif RANK_DIR not in os.environ and pulse.now != "init":
        print(f"clipship: rank {world.rank} on {world.node}: {error}", file=sys.stderr)
    _leave(world, EXIT_FAILED if isinstance(error, Unfit | Unreadable) else EXIT_BAD_INPUT, str(error))


def _fail(world: World, error: Exception) -> NoReturn:
    trace = "".join(traceback.format_exception(error))
    if RANK_DIR in os.environ:  # the supervisors show the first cause's trace; those of the ranks that fail with it would bury it
        console = [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
        for handler in console:
            logging.getLogger().removeHandler(handler)
    log.error("rank %d on %s failed\n%s", world.rank, world.node, trace)
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    _leave(world, EXIT_FAILED, f"out of memory: {reason}; {memory.hint()}" if memory.is_out_of_memory(error) else reason, trace)


def _leave(world: World, exit_code: int, reason: str, details: str = "") -> NoReturn:
    """The reason into a file, then out at once: the others wait for this rank in a collective, and its clean-up may wait for them."""
    record_exit(ExitRecord(world.rank, world.node, exit_code, reason, time.time(), details), os.environ)
    leave_now(exit_code)
