"""The command `clipship index`. Imports no torch."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path

import click

from trainer.cli.options import DataOf, data_options, processes_option
from trainer.sysinfo.parent import end_with_parent
from trainer.text.live import progress
from trainer.text.wording import many


@click.command(
    epilog="""\b
Examples:
  clipship index 'shards/{0000..0099}.tar'
  clipship index https://host/cc3m/{00000..00331}.tar --to cc3m-index   \
  (data.index = "cc3m-index" in the job)"""
)
@click.argument("shards", nargs=-1, required=True)
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    help="Folder of the index. [default: .clipship-index beside the first shard]",
)
@data_options(
    *("image_key", "caption_key", "image_column", "caption_column", "filters", "scores", "scores_by"),
    "group_by",
)
@processes_option("read headers", "one for each core; of URLs 16 threads")
def command(
    shards: tuple[str, ...],
    to: Path | None,
    data: DataOf,
    processes: int | None,
) -> None:
    """Read the headers of SHARDS (names, braces, globs, URLs) and write where each sample is.

    SHARDS may be Parquet or Arrow files, too. A run then opens them at once; without an index it makes one
    itself. Only files that are new or have changed are read. The index's folder goes to stdout.
    """
    from trainer.config import is_remote
    from trainer.config.formats import FORMATS
    from trainer.data.bad_samples import ANY
    from trainer.data.index import index_folder, index_shards, open_index, raise_all, stale, write_catalogue
    from trainer.data.shard_names import expand_shards, refuse_streams
    from trainer.data.shards import damages
    from trainer.data.source import open_with_index, selection_of
    from trainer.errors import InputError

    refuse_streams(shards)
    named = data(shards)
    row, selection = FORMATS[named.kind], selection_of(named)
    if selection is None:
        raise InputError(f"{shards[0]}: a {row.unit} needs no index: it is read whole when a run starts")
    paths = expand_shards(shards)
    folder = to or index_folder(paths)
    if folder is None:
        raise InputError(
            f"{paths[0]}: no index can be written beside it: name a folder for the index with --to, and as "
            "data.index in the job file"
        )
    missing = stale(paths, selection, folder.absolute())
    if missing:
        with progress("reading headers", "read", row.unit) as done:
            # Headers are parsed in Python, so threads would share one core; far storage is mostly waited for.
            pool = None
            if processes or not any(map(is_remote, missing)):
                pool = ProcessPoolExecutor(
                    min(len(missing), processes or cpu_count() or 1),
                    mp_context=get_context("forkserver"),
                    initializer=end_with_parent,
                )
            entries = index_shards(
                missing, selection, folder.absolute(), lambda count, _: done(count, len(missing)), pool
            )
        write_catalogue(folder.absolute(), selection, entries)
    index = open_index(paths, selection, folder.absolute())
    source = open_with_index(index, named, ANY)
    click.echo(
        f"{len(missing):,} of {many(len(paths), row.unit)} read; {many(len(source), 'sample')}", err=True
    )
    for cause, count in source.left_out.every.items():
        click.echo(f"{many(count, 'sample')} not used: {cause}", err=True)
    damaged = damages(index)
    if damaged:
        click.echo(
            f'The index in {folder} is kept. A run with data.on_bad_sample = "skip" does without the lost '
            "samples.",
            err=True,
        )
    raise_all(damaged)
    click.echo(folder)
