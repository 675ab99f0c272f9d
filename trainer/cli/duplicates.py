"""The command `clipship duplicates`: how near each picture is to an earlier one, as a table for data.scores.

Imports no torch.
"""

import time
from pathlib import Path

import click

from trainer.cli.options import Command, NearChoice
from trainer.cli.output import print_json
from trainer.errors import EXIT_DONE, InputError
from trainer.text.live import progress, waiting
from trainer.text.terminal import one_line, say
from trainer.text.wording import many


@click.command(cls=Command)
@click.argument("features", metavar="FEATURES")
@click.option(
    "--out",
    default="duplicates.parquet",
    show_default=True,
    metavar="FILE",
    help="Table to write, here or at an address of object storage.",
)
@click.option(
    "--method",
    type=NearChoice(("exact", "lists")),
    help="exact: compare all pairs; lists: only with what faiss finds near, and measure the share that is "
    "found. [default: exact where it takes ten minutes at most]",
)
def command(features: str, out: str, method: str | None) -> int:
    """Say of each picture how near it is to an earlier one, by the features that `clipship embed` wrote.

    FEATURES is their folder, or its address. The table has a row for each picture: shard, key, row, nearest
    (its largest cosine with an earlier picture, -1 for the first), of_shard and of_key (that picture). With
    data.scores = "duplicates.parquet", data.filters = ["scores:nearest < 0.95"] leaves out all that are as
    near as this to an earlier one; the first of each group stays. Counts for some thresholds go to stdout as
    one JSON object. It computes on a GPU if there is one.

    Examples:
      clipship duplicates features
      clipship duplicates s3://pool/features --out s3://pool/duplicates.parquet --method lists
    """
    start = time.monotonic()
    _check_place(out)
    with waiting("reading features"):
        from trainer.search.duplicates import (
            METHODS,
            counts,
            found_share,
            method_for,
            read_pictures,
            write_table,
        )

        pictures = read_pictures(features.rstrip("/"))
        chosen = method or method_for(pictures.vectors)
    total = len(pictures.vectors)
    with progress("comparing", "compared", "picture") as done:
        found = METHODS[chosen](pictures.vectors, lambda count: done(count, total))  # type: ignore[index]
    with waiting("writing the table"):
        write_table(pictures, found, out)
        share = found_share(pictures.vectors, found, chosen)  # type: ignore[arg-type]
    near = counts(found)
    say(
        f"{many(total, 'picture')}; "
        + ", ".join(f"{count:,} at a cosine of {least} or more" for least, count in near.items())
        + f': data.scores = "{one_line(out)}" and data.filters = ["scores:nearest < ..."] leave them out'
    )
    print_json(
        {
            "features": features,
            "out": out,
            "pictures": total,
            "method": chosen,
            "near_duplicates": near,
            "found_share": share,
            "seconds": round(time.monotonic() - start, 1),
        }
    )
    return EXIT_DONE


def _check_place(out: str) -> None:
    """Raises InputError before anything is computed if `data.scores` or a store would not take the table."""
    from trainer.config import is_remote
    from trainer.data.store import check_writable

    if not out.endswith(".parquet"):
        raise InputError(f"--out {out}: a table for data.scores ends with .parquet")
    if is_remote(out):
        check_writable(out.rpartition("/")[0])
        return
    try:
        Path(out).absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: its folder cannot be made: {error.strerror}") from None
