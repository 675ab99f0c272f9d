"""Turns a command line of open_clip_train into a job file. Reads no data; imports no torch."""

import tomllib
from collections.abc import Sequence

from trainer.config.loader import job_from_table
from trainer.errors import InputError
from trainer.from_open_clip.read import read
from trainer.from_open_clip.table import flags_of
from trainer.from_open_clip.toml import job_text
from trainer.from_open_clip.translation import Translation
from trainer.text.masking import masked
from trainer.text.paste import command as paste

_ORIGIN = "this command line as a job"


def job_file(
    arguments: Sequence[str], gpus: int | None = None, release: str | None = None
) -> tuple[str, Translation]:
    """Returns the job file, and with it the flags that become no key or cannot be honoured.

    `release` is one of RELEASES; None finds it out, as `read` does.

    Raises InputError for a command line that open_clip_train or our loader refuses.
    """
    line = read(arguments, gpus, release)
    if not line["--train-data"] and line.format != "synthetic":
        raise InputError(
            "--train-data is missing: without it open_clip_train only evaluates, and `clipship eval` does "
            "that"
        )
    result = Translation()
    for flag in flags_of(line.release):
        flag.apply(line, result)
    if gpus is None and line.gpus == 1:
        result.notes.append("the global batch is that of 1 GPU: --gpus says how many there are")
    begin = [
        f"Written by `clipship from-open-clip` from a command line of open_clip_train {line.release}:",
        masked(paste(*arguments)),
        (
            f"Start it with `clipship run JOB --nproc {line.gpus}`, one rank for each GPU. Relative paths "
            "start at this file's folder."
        ),
    ]
    text = job_text(result.settings, begin, [*result.notes, *result.left_out()])
    job_from_table(tomllib.loads(text), _ORIGIN)
    return text, result
