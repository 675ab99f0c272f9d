"""The command `clipship pack`. Imports no torch."""

from pathlib import Path

import click


@click.command(
    epilog="""\b
Examples:
  clipship pack cc3m.tsv shards/
  clipship pack data.csv shards/ --image-column filepath --caption-column title --samples-per-shard 5000"""
)
@click.argument("table", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--samples-per-shard", type=click.IntRange(min=1), default=1000, show_default=True, metavar="N", help="Samples of one shard.")
@click.option("--image-column", default="image", show_default=True, metavar="NAME", help="Column with the image file's path.")
@click.option("--caption-column", default="caption", show_default=True, metavar="NAME", help="Column with the caption.")
@click.option("--separator", metavar="CHARACTER", help="Between columns; without it, a tab for .tsv and a comma for others.")
@click.option("--force", is_flag=True, help="Replace shards that were packed into OUT before.")
def command(
    table: Path, out: Path, samples_per_shard: int, image_column: str, caption_column: str, separator: str | None, force: bool
) -> None:
    """Pack TABLE (.csv or .tsv: one image and caption a row) into WebDataset shards in the folder OUT.

    Image paths in TABLE are relative to it. OUT is written whole or not at all. What a job needs for data.train goes to stdout.
    """
    from rich.console import Console
    from rich.progress import Progress

    from trainer.data.pack import pack

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"packing {table.name}", total=None)
        shards = pack(
            table,
            out,
            samples_per_shard=samples_per_shard,
            image_column=image_column,
            caption_column=caption_column,
            separator=separator,
            force=force,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    click.echo(out / (shards[0].name if len(shards) == 1 else f"shard-{{000000..{len(shards) - 1:06d}}}.tar"))
