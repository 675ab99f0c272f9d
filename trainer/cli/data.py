"""The commands `clipship data stats` and `clipship data show`. Imports no torch."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import caption_key_option, image_key_option
from trainer.errors import InputError
from trainer.text.terminal import shown

if TYPE_CHECKING:
    from trainer.data.sample import Source

SHARDS = click.argument("shards", nargs=-1, required=True)


@click.group(
    epilog="""\b
Examples:
  clipship data stats 'shards/*.tar'
  clipship data show 'shards/*.tar' --out sheet.png"""
)
def command() -> None:
    """Inspect the content of shards."""


@command.command()
@SHARDS
@image_key_option
@caption_key_option
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    metavar="N",
    help="Number of samples to inspect.",
)
def stats(shards: tuple[str, ...], image_key: tuple[str, ...], caption_key: str, samples: int) -> None:
    """Count the samples of SHARDS, and inspect some of them.

    The inspected samples are spread evenly; image sizes, caption lengths and bad samples are reported. JSON
    goes to stdout.
    """
    from trainer.data.inspect import statistics

    click.echo(
        shown(
            json.dumps(
                statistics(_source(shards, image_key, caption_key), samples), indent=2, ensure_ascii=False
            )
        )
    )


@command.command()
@SHARDS
@image_key_option
@caption_key_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("contact-sheet.png"),
    show_default=True,
    help="Picture to write.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1, max=400),
    default=24,
    show_default=True,
    metavar="N",
    help="Number of samples, which are spread evenly.",
)
def show(
    shards: tuple[str, ...], image_key: tuple[str, ...], caption_key: str, out: Path, samples: int
) -> None:
    """Write a contact sheet of SHARDS as PNG: images with the beginning of their captions.

    The name of the picture goes to stdout.
    """
    from trainer.data.inspect import contact_sheet

    sheet = contact_sheet(_source(shards, image_key, caption_key), samples)
    try:
        sheet.save(out, "png")
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    click.echo(out)


def _source(shards: tuple[str, ...], image_key: tuple[str, ...], caption_key: str) -> "Source":
    from trainer.data.bad_samples import ANY
    from trainer.data.shard_names import expand_seekable
    from trainer.data.shards import open_shards
    from trainer.data.source import IMAGE_ENDINGS

    return open_shards(
        expand_seekable(shards), image_key or IMAGE_ENDINGS, caption_key, "captions", allowed=ANY
    )
