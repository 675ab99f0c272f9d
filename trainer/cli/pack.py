"""The command `clipship pack`. Imports no torch."""

from os import cpu_count
from pathlib import Path

import click

from trainer.cli.options import Command, DataOf, Finite, count_option, data_options, processes_option
from trainer.errors import InputError
from trainer.text.live import progress
from trainer.text.paste import as_pattern
from trainer.text.terminal import one_line
from trainer.text.wording import many


@click.command(cls=Command)
@click.argument("table")
@click.argument("out")
@count_option("--samples-per-shard", "Samples per shard.", default=1000)
@data_options(
    "image_column", "caption_column", "caption_template", "empty_captions", "separator", "quotes", "encoding"
)
@click.option(
    "--shard-mb",
    type=Finite(min=0, min_open=True),
    metavar="MB",
    help="Largest size of a shard's images, instead of a number of samples.",
)
@count_option(
    "--resize", "Scale larger images down to this shorter side; all images become JPEG.", metavar="PIXELS"
)
@click.option(
    "--skip-bad-rows",
    is_flag=True,
    help="Leave out rows without a caption, or without an image that can be read; bad-rows.tsv lists them.",
)
@processes_option("make shards")
@click.option("--force", is_flag=True, help="Replace shards that were packed into OUT before.")
def command(
    table: str,
    out: str,
    samples_per_shard: int,
    data: DataOf,
    shard_mb: float | None,
    resize: int | None,
    skip_bad_rows: bool,
    processes: int | None,
    force: bool,
) -> None:
    """Pack TABLE (.csv, .tsv, .parquet or .arrow) into WebDataset shards in the folder OUT, with their index.

    A row of TABLE has one image and its captions. Image paths are relative to TABLE; its other columns become
    each sample's JSON. OUT appears when it is complete; after an interruption the same command continues. The
    pattern for data.train goes to stdout.

    OUT may be an address, such as s3://bucket/shards, whose keys come from the environment. Each shard goes
    there when it is complete and is compared there; sizes.json comes last, and a run makes the index.

    Of Chinese-CLIP's pair of files, NAME_imgs.tsv and NAME_texts.jsonl, TABLE is the first.

    Examples:
      clipship pack cc3m.tsv shards/
      clipship pack cc3m.tsv s3://bucket/cc3m
      clipship pack data.csv shards/ --image-column filepath --caption-column title --samples-per-shard 5000
    """
    from trainer.data.pack import BAD_ROWS, Recipe, pack

    if "://" in table:
        raise InputError(f"{table}: a table is packed from a file system: copy it to a file first")
    far = "://" in out
    out = out.rstrip("/") if far else out
    with progress(f"packing {one_line(Path(table).name)}", "packed", "row") as done:
        packed = pack(
            Path(table),
            out if far else Path(out),
            samples_per_shard=samples_per_shard,
            data=data([table]),
            shard_mb=shard_mb,
            recipe=Recipe(resize, skip_bad_rows),
            processes=processes or cpu_count() or 1,
            force=force,
            progress=done,
        )
    shards = packed.shards
    if packed.bad:
        click.echo(f"{many(len(packed.bad), 'row')} left out, listed in {_within(out, BAD_ROWS)}", err=True)
    for column, rows in packed.bytes_in.items():
        click.echo(
            f"column {one_line(column)!r} holds bytes in {many(rows, 'row')}, which JSON does not have: they "
            "are null in the samples' JSON",
            err=True,
        )
    name = shards[0].name if len(shards) == 1 else f"shard-{{000000..{len(shards) - 1:06d}}}.tar"
    click.echo(_within(as_pattern(out), name))


def _within(out: str, name: str) -> str:
    return f"{out}/{name}" if "://" in out else str(Path(out) / name)
