"""Console log and exit of a rank, the same for training and for evaluation. No torch."""

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn, TextIO

from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    InputError,
    MachineError,
    Preempted,
    StorageError,
    UnfitNode,
)
from trainer.run.exit_record import RANK_DIR, ExitRecord, record_exit
from trainer.sysinfo import collector, memory
from trainer.sysinfo.shortage import raise_open_files_limit, shortage
from trainer.sysinfo.signals import reset_inherited_signals
from trainer.text.fitting import fit_to
from trainer.text.terminal import erased, say, shown, tell
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World, detect

log = logging.getLogger("clipship")


def run_rank(stream: TextIO, work: Callable[[World, Heartbeat], None]) -> int:
    """Detects this rank's world, sets up its log and runs `work`; returns 0.

    Any other end leaves the process here, with its reason recorded.
    """
    collector.collect_from_here()
    reset_inherited_signals(asks=RANK_DIR not in os.environ)
    heartbeat = Heartbeat.open(os.environ)
    heartbeat.reach("running")
    try:
        world = detect(os.environ, os.uname().nodename)
    except InputError as error:
        say(error)
        exit_now(EXIT_BAD_INPUT)
    set_up_logging(world, stream)
    try:
        raise_open_files_limit()
        work(world, heartbeat)
    except Preempted as error:
        log.info("%-12s %s", "preempted", error)
        _exit(world, EXIT_PREEMPTED, str(error))
    except (InputError, MachineError) as error:
        _refuse(world, heartbeat, error)
    except Exception as error:
        if sentence := shortage(error):
            _refuse(world, heartbeat, MachineError(sentence))
        _fail(world, error)
    return EXIT_DONE


def set_up_logging(world: World, stream: TextIO) -> None:
    """Sends rank 0's log to the stream; of other ranks only errors go out, to stderr.

    Log files, which are opened later, get every line.
    """
    handler = logging.StreamHandler(stream if world.rank == 0 else sys.stderr)
    handler.setLevel(logging.INFO if world.rank == 0 else logging.ERROR)
    handler.addFilter(lambda record: record.name == "clipship" or record.levelno >= logging.WARNING)
    handler.setFormatter(_FittedFormatter(handler.stream, world))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # otherwise a full disk would print a traceback for every line


def rank_formatter(world: World, before: str = "") -> logging.Formatter:
    """Returns the formatter of a rank's log; `before` stands before each message, in logging's %-style.

    From generation 2 on warnings and errors begin with the generation; the other lines follow one that names
    it.
    """
    return _RankFormatter(world, before)


class ShownFormatter(logging.Formatter):
    """Formatter of every log that people read, on the console and in files."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record's text as `shown` does."""
        return shown(super().format(record))


class _RankFormatter(ShownFormatter):
    """Formats records as `rank_formatter` says."""

    def __init__(self, world: World, before: str = "") -> None:
        super().__init__(f"{before}%(message)s")
        self._generation = f"[generation {world.generation}] " if world.generation > 1 else ""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        if record.levelno >= logging.WARNING:
            record.message = self._generation + record.message  # made anew for each handler
        return super().formatMessage(record)


class _FittedFormatter(_RankFormatter):
    """Formats lines of the console as `rank_formatter`, short enough for a terminal.

    They erase the line that `clipship run` rewrites there.
    """

    def __init__(self, stream: TextIO, world: World) -> None:
        super().__init__(world)
        self._stream = stream

    def format(self, record: logging.LogRecord) -> str:
        return erased(self._stream) + fit_to(self._stream, super().format(record))


def exit_now(exit_code: int) -> NoReturn:
    """Ends the process without the interpreter's clean-up.

    That clean-up may wait for other ranks, or abort because of a library's threads.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has gone
            stream.flush()
    os._exit(exit_code)


def _refuse(world: World, heartbeat: Heartbeat, error: InputError | MachineError) -> NoReturn:
    """Shows the problem once and leaves.

    During init all ranks find the same problem, so rank 0 alone shows it; later a single rank's data may be
    wrong, so that rank does. Under a supervisor the rank stays silent, since the supervisor shows it.
    """
    if RANK_DIR not in os.environ and world.rank == 0:
        say(error)
    elif RANK_DIR not in os.environ and heartbeat.current_phase != "init":
        say(f"rank {world.rank} on {world.node}: {error}")
    code = EXIT_FAILED if isinstance(error, MachineError | StorageError) else EXIT_BAD_INPUT
    _exit(world, code, str(error), unfit=error.node if isinstance(error, UnfitNode) else "")


def _fail(world: World, error: Exception) -> NoReturn:
    trace = "".join(traceback.format_exception(error))
    # The supervisors show the first cause's trace; traces of the ranks that fail after it would bury it.
    if RANK_DIR in os.environ:
        console = [
            handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler
        ]
        for handler in console:
            logging.getLogger().removeHandler(handler)
    log.error("rank %d on %s failed\n%s", world.rank, world.node, trace)
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    _exit(
        world,
        EXIT_FAILED,
        f"out of memory: {reason}; {memory.hint()}" if memory.is_out_of_memory(error) else reason,
        trace,
    )


def _exit(world: World, exit_code: int, reason: str, details: str = "", unfit: str = "") -> NoReturn:
    """Writes the reason into a file, then leaves at once.

    The other ranks wait for this one in a collective, and its clean-up may wait for them.
    """
    record = ExitRecord(world.rank, world.node, exit_code, shown(reason), time.time(), shown(details))
    if not record_exit(replace(record, unfit=unfit), os.environ) and RANK_DIR in os.environ:
        tell(record.text())  # the supervisor cannot say it
    exit_now(exit_code)
