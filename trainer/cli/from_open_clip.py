"""The command `clipship from-open-clip`: prints the job file of a command line of open_clip_train.

Reads no data and starts nothing; imports no torch.
"""

import click

from trainer.cli.options import Command, count_option
from trainer.errors import InputError
from trainer.from_open_clip.line import RELEASES
from trainer.text.terminal import say


@click.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True},  # so that the flags may stand without -- before them
)
@count_option(
    "--gpus",
    "GPUs of all nodes together, for the global batch: --batch-size is that of one GPU. Without it, "
    "what torchrun is told in ARGS, else 1.",
)
@click.option(
    "--release",
    type=click.Choice(RELEASES),
    help="Release of open_clip_train that ARGS is for; 4 is its main branch, with other defaults. Without "
    "it, the oldest one that has all flags of ARGS.",
)
@click.option("--partial", is_flag=True, help="Print the job without the flags that it cannot honour.")
@click.argument("arguments", metavar="-- ARGS...", nargs=-1, type=click.UNPROCESSED)
def command(gpus: int | None, release: str | None, partial: bool, arguments: tuple[str, ...]) -> None:
    r"""Print the job file of a command line of open_clip_train.

    ARGS is that command line, with or without the program in front. Flags without a matching key are listed
    on stderr, with the reason. A flag that cannot be honoured ends with exit code 2, unless --partial is
    given.

    Examples:
      clipship from-open-clip --gpus 8 -- --train-data 'cc3m/{0000..0331}.tar' --model ViT-B-32 \
          --batch-size 256 --precision amp_bf16 --train-num-samples 2905954 > job.toml
      clipship from-open-clip -- torchrun --nproc_per_node 8 -m open_clip_train.main --train-data ...

    Its page in the documents, docs/from-open-clip.md, has each flag beside our keys.
    """
    from trainer.from_open_clip.job_file import job_file

    text, result = job_file(arguments, gpus, release)
    if result.refused and not partial:
        problems = [f"{flag}: {why}" for flag, why in result.refused.items()]
        raise InputError("\n".join([*problems, "--partial prints the job without them"]))
    for line in (*result.notes, *result.left_out()):
        say(line)
    click.echo(text, nl=False)
