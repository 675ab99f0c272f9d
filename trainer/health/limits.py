"""What a supervisor needs from the job file. Read in a child process, so that the model's memory goes away with it. No torch."""

import json
import os
import select
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

READ_S = 60.0


@dataclass(frozen=True)
class Limits:
    """Seconds, and the run folder ("": not known). The defaults serve a job that cannot be read: its rank says why and leaves."""

    init_s: float = 300.0
    checkpoint_s: float = 600.0
    shutdown_s: float = 60.0
    silence_s: float = 6.0
    run_folder: str = ""


def read_limits(words: Sequence[str]) -> Limits:
    """From the words that the rank gets: JOB [--set KEY=VALUE ...]. Call it before any thread is started."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(words, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read() if select.select([pipe], [], [], READ_S)[0] else b""
    if found:
        os.waitpid(child, 0)
    return Limits(**json.loads(found)) if found else Limits()


def _child(words: Sequence[str], writing: int) -> None:
    try:
        os.write(writing, json.dumps(asdict(_from_job(words))).encode())
    finally:
        os._exit(0)


def _from_job(words: Sequence[str]) -> Limits:
    from trainer import jobfile
    from trainer.errors import InputError
    from trainer.inputs.run_folder import run_folder

    overrides = [value for option, value in pairwise(words) if option == "--set"]
    overrides += [word.partition("=")[2] for word in words if word.startswith("--set=")]
    try:
        job = jobfile.load(Path(next(iter(words), "")), overrides)
    except InputError:
        return Limits()
    limits = job.timeouts
    return Limits(limits.init_s, limits.checkpoint_s, limits.shutdown_s, limits.silence_s, str(run_folder(job).absolute()))
