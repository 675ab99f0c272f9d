"""The commands `clipship data stats` and `clipship data show`. Imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import DataOf, Group, count_option, data_options
from trainer.cli.output import print_json
from trainer.errors import InputError
from trainer.safe_io.atomic import write_whole

if TYPE_CHECKING:
    from trainer.data.sample import Source

DATA = click.argument("files", metavar="DATA...", nargs=-1, required=True)
SOURCE = data_options(
    "image_key",
    "caption_key",
    "caption_lines",
    "caption_template",
    "empty_captions",
    "filters",
    "scores",
    "scores_by",
    "image_column",
    "caption_column",
    "separator",
    "quotes",
    "encoding",
)


@click.group(cls=Group)
def command() -> None:
    """Inspect the content of shards and tables.

    Examples:
      clipship data stats 'shards/*.tar'
      clipship data stats captions.csv
      clipship data stats captions.csv --image-column filepath --caption-column title
      clipship data show 'shards/*.tar' --out sheet.html
    """


@command.command()
@DATA
@SOURCE
@count_option("--samples", "Number of samples to inspect.", default=1000)
@click.option(
    "--model",
    default="ViT-B-32",
    show_default=True,
    metavar="NAME",
    help="Model, or its config, whose tokens of captions are counted: any with open_clip's own tokenizer.",
)
@click.option(
    "--context-length",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Most tokens of a caption, as model.context_length in a job file.  [default: the model's]",
)
def stats(files: tuple[str, ...], data: DataOf, samples: int, model: str, context_length: int | None) -> None:
    """Count the samples of DATA, shards or tables, and inspect some of them.

    The inspected samples are spread evenly; image sizes, caption lengths, the share of captions that lose
    their end in the model, and bad samples are reported. JSON goes to stdout.
    """
    from trainer.config import Model
    from trainer.data.inspect import statistics
    from trainer.model.catalog import check_model
    from trainer.model.light_tokenizer import lengths_for

    check_model(model)
    settings = Model(name=model, context_length=context_length)
    numbers = statistics(_source(files, data), samples, lambda texts: lengths_for(settings, texts))
    print_json(numbers, pretty=True)


@command.command()
@DATA
@SOURCE
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("contact-sheet.html"),
    show_default=True,
    metavar="FILE",
    help="Page to write, which ends with .html.",
)
@count_option("--samples", "Number of samples, which are spread evenly.", default=24, most=400)
def show(files: tuple[str, ...], data: DataOf, out: Path, samples: int) -> None:
    """Write a contact sheet of DATA, shards or tables: images with their first captions.

    It is a page for a browser, with all images in one file. Its name goes to stdout.
    """
    from trainer.data.inspect import contact_page

    if out.suffix != ".html":
        raise InputError(f"--out {out}: the contact sheet is a page: give a name that ends with .html")
    try:
        write_whole(out, contact_page(_source(files, data), samples))
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    click.echo(out)


def _source(files: tuple[str, ...], data: DataOf) -> "Source":
    from trainer.data.bad_samples import ANY
    from trainer.data.check import check_data
    from trainer.data.shard_names import refuse_streams
    from trainer.data.source import open_source

    refuse_streams(files)
    named = data(files).model_copy(update={"max_bad_share": 1.0})  # what is wrong is what is asked
    check_data(named, "DATA")
    return open_source(named, allowed=ANY)
