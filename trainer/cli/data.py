"""The commands `clipship data stats` and `clipship data show`. Imports no torch."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import (
    caption_column_option,
    caption_key_option,
    encoding_option,
    image_column_option,
    image_key_option,
    separator_option,
)
from trainer.errors import InputError
from trainer.text.terminal import shown

if TYPE_CHECKING:
    from trainer.data.sample import Source

DATA = click.argument("files", metavar="DATA...", nargs=-1, required=True)
_TABLES = (".csv", ".tsv", ".parquet")


@click.group(
    epilog="""\b
Examples:
  clipship data stats 'shards/*.tar'
  clipship data stats captions.csv
  clipship data stats captions.csv --image-column filepath --caption-column title
  clipship data show 'shards/*.tar' --out sheet.png"""
)
def command() -> None:
    """Inspect the content of shards and tables."""


@command.command()
@DATA
@image_key_option
@caption_key_option
@image_column_option
@caption_column_option
@separator_option
@encoding_option
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    metavar="N",
    help="Number of samples to inspect.",
)
def stats(
    files: tuple[str, ...],
    image_key: tuple[str, ...],
    caption_key: str,
    image_column: str,
    caption_column: str,
    separator: str | None,
    encoding: str,
    samples: int,
) -> None:
    """Count the samples of DATA, shards or tables, and inspect some of them.

    The inspected samples are spread evenly; image sizes, caption lengths and bad samples are reported. JSON
    goes to stdout.
    """
    from trainer.data.inspect import statistics

    source = _source(files, image_key, caption_key, image_column, caption_column, separator, encoding)
    click.echo(shown(json.dumps(statistics(source, samples), indent=2, ensure_ascii=False)))


@command.command()
@DATA
@image_key_option
@caption_key_option
@image_column_option
@caption_column_option
@separator_option
@encoding_option
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
    files: tuple[str, ...],
    image_key: tuple[str, ...],
    caption_key: str,
    image_column: str,
    caption_column: str,
    separator: str | None,
    encoding: str,
    out: Path,
    samples: int,
) -> None:
    """Write a contact sheet of DATA, shards or tables, as PNG: images with the beginning of their captions.

    The name of the picture goes to stdout.
    """
    from trainer.data.inspect import contact_sheet

    sheet = contact_sheet(
        _source(files, image_key, caption_key, image_column, caption_column, separator, encoding), samples
    )
    try:
        sheet.save(out, "png")
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    click.echo(out)


def _source(
    files: tuple[str, ...],
    image_key: tuple[str, ...],
    caption_key: str,
    image_column: str,
    caption_column: str,
    separator: str | None,
    encoding: str,
) -> "Source":
    from trainer.config.caption_key import parse_caption_key
    from trainer.data.bad_samples import ANY
    from trainer.data.captions import CaptionReader
    from trainer.data.sample import MOST_BYTES
    from trainer.data.shard_names import expand_seekable
    from trainer.data.shards import open_shards
    from trainer.data.source import IMAGE_ENDINGS
    from trainer.data.tables import TableSource, list_rows, missing_images, read_table

    if separator is not None and len(separator) != 1:
        raise InputError(f"--separator {separator!r}: give one character, such as ';'")
    found = expand_seekable(files)
    tables = [file for file in found if file.endswith(_TABLES)]
    if not tables:
        key, endings = parse_caption_key(caption_key), image_key or IMAGE_ENDINGS
        captions = CaptionReader(key.path, encoding)
        return open_shards(found, endings, key.ending, "captions", allowed=ANY, captions=captions)
    if len(tables) < len(found):
        raise InputError(f"{tables[0]} is a table, and other files are not: give tables or shards, not both")
    read = [read_table(table, image_column, caption_column, separator, encoding=encoding) for table in tables]
    for name, table in zip(tables, read, strict=True):
        if missing := missing_images(table):
            raise InputError(f"{name}: the images of {list_rows(missing)} are missing")
    return TableSource(read, MOST_BYTES)
