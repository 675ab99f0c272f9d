"""The command `clipship from-open-clip`: prints the job file of a command line of open_clip_train.

Reads no data and starts nothing; imports no torch.
"""

import tomllib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from trainer.errors import InputError
from trainer.text.masking import masked
from trainer.text.paste import command as paste
from trainer.text.terminal import say

if TYPE_CHECKING:
    from trainer.cli.from_open_clip.translation import Translation

_ORIGIN = "this command line as a job"


@click.command(
    context_settings={"ignore_unknown_options": True},  # so that the flags may stand without -- before them
    epilog="""\b
Examples:
  clipship from-open-clip --gpus 8 -- --train-data 'cc3m/{0000..0331}.tar' --model ViT-B-32 \\
      --batch-size 256 --precision amp_bf16 --train-num-samples 2905954 > job.toml
  clipship from-open-clip -- torchrun --nproc_per_node 8 -m open_clip_train.main --train-data ...

Its page in the documents, docs/from-open-clip.md, has each flag beside our keys.""",
)
@click.option(
    "--gpus",
    type=click.IntRange(min=1),
    metavar="N",
    help="GPUs of all nodes together, for the global batch: --batch-size is that of one GPU. Without it, "
    "what torchrun is told in ARGS, else 1.",
)
@click.option("--partial", is_flag=True, help="Print the job without the flags that it cannot honour.")
@click.argument("arguments", metavar="-- ARGS...", nargs=-1, type=click.UNPROCESSED)
def command(gpus: int | None, partial: bool, arguments: tuple[str, ...]) -> None:
    """Print the job file of a command line of open_clip_train.

    ARGS is that command line, with or without the program in front. Flags without a matching key are listed
    on stderr, with the reason. A flag that cannot be honoured ends with exit code 2, unless --partial is
    given.
    """
    text, result = job_file(arguments, gpus)
    if result.refused and not partial:
        problems = [f"{flag}: {why}" for flag, why in result.refused.items()]
        raise InputError("\n".join([*problems, "--partial prints the job without them"]))
    for line in (*result.notes, *result.left_out()):
        say(line)
    click.echo(text, nl=False)


def job_file(arguments: Sequence[str], gpus: int | None = None) -> "tuple[str, Translation]":
    """Returns the job file, and with it the flags that become no key or cannot be honoured.

    Raises InputError for a command line that open_clip_train or our loader refuses.
    """
    from trainer.cli.from_open_clip.read import read
    from trainer.cli.from_open_clip.table import FLAGS, VERSION
    from trainer.cli.from_open_clip.toml import job_text
    from trainer.cli.from_open_clip.translation import Translation
    from trainer.config.loader import job_from_table

    line = read(arguments, gpus)
    if not line["--train-data"] and line.format != "synthetic":
        raise InputError(
            "--train-data is missing: without it open_clip_train only evaluates, and `clipship eval` does "
            "that"
        )
    result = Translation()
    for flag in FLAGS.values():
        flag.apply(line, result)
    if gpus is None and line.gpus == 1:
        result.notes.append("the global batch is that of 1 GPU: --gpus says how many there are")
    begin = [
        f"Written by `clipship from-open-clip` from a command line of open_clip_train {VERSION}:",
        masked(paste(*arguments)),
        (
            f"Start it with `clipship run JOB --nproc {line.gpus}`, one rank for each GPU. Relative paths "
            "start at this file's folder."
        ),
    ]
    text = job_text(result.settings, begin, [*result.notes, *result.left_out()])
    job_from_table(tomllib.loads(text), _ORIGIN)
    return text, result
