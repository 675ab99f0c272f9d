"""The command `clipship embed`: writes features of images and captions, and their cosine, as Parquet.

Imports no torch.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from trainer.cli import suggested
from trainer.cli.options import (
    Command,
    NearChoice,
    count_option,
    given_hosts,
    hosts_option,
    set_of,
    weights_model_option,
)
from trainer.cli.output import print_json
from trainer.errors import EXIT_DONE, InputError
from trainer.text.terminal import say
from trainer.text.wording import many


@click.command(cls=Command)
@click.argument("checkpoint", shell_complete=suggested.runs)
@click.argument("shards", nargs=-1, required=True)
@click.option(
    "--out",
    metavar="FOLDER",
    help="Folder, or address of object storage, for the files. [default: `features` beside each shard]",
)
@click.option(
    "--dtype",
    type=NearChoice(("fp16", "fp32")),
    default="fp16",
    show_default=True,
    help="Type of the stored features; cosines are those before.",
)
@click.option(
    "--of",
    metavar="JOB",
    help="Job file that is to train on what is stored (model.targets): SHARDS are read as its [data] says.",
)
@count_option("--views", "With --of: store N features of each image, of N pictures as JOB augments them.")
@weights_model_option
@count_option("--nproc", "Number of ranks on this machine. [default: 1]")
@hosts_option
@set_of("of the embedding's job, e.g. eval.batch_size=256 or data.caption_key=json:caption.")
def command(
    checkpoint: str,
    shards: tuple[str, ...],
    out: str | None,
    dtype: str,
    of: str | None,
    views: int | None,
    model: str | None,
    nproc: int | None,
    hosts: str | None,
    overrides: tuple[str, ...],
) -> int:
    """Write the features of the images and captions of SHARDS, and their cosine, as Parquet files.

    CHECKPOINT is what `clipship eval` takes. SHARDS (names, braces, globs, URLs; tables, too) are read as the
    run's [data] says. There is a file for each shard, with a row for each caption: shard, key, row (the
    sample's number in the shard), caption (its number in the sample), image, text, cosine, problem. A sample
    that cannot be used has one row with its problem and no features, and is counted. Files of the same model
    that are there are kept: the same command goes on after any end. One JSON object goes to stdout. With
    --hosts, all hosts must see the working folder.

    With --views, JOB draws for each epoch and sample one of the N pictures that the model has seen here, and
    learns from what it made of that one.

    Examples:
      clipship embed runs/digits 'shards/*.tar' --nproc 2
      clipship embed ViT-L-14:openai 'shards/*.tar' --out targets --of job.toml --views 8
      clipship embed ViT-B-32:openai 's3://pool/{000..999}.tar' --out s3://pool/features --hosts a:8,b:8
    """
    from trainer.config.loader import load_job
    from trainer.data.feature_files import feature_files
    from trainer.data.shard_names import expand_shards, refuse_streams
    from trainer.launch.evaluation import evaluated
    from trainer.plan.trained import embed_job
    from trainer.sysinfo.extras import require

    named_hosts, start = given_hosts(nproc, hosts), time.monotonic()
    ranks = sum(host.slots for host in named_hosts) if named_hosts else nproc or 1
    refuse_streams(shards)
    require("pyarrow")
    place = _place(out)
    if views and of is None:
        raise InputError("--views stores pictures as a job augments them: name the job with --of")
    job = embed_job(checkpoint, model, shards, ranks, overrides, load_job(Path(of)) if of else None)
    feature_files(expand_shards(job.retrieval_data.train), place or None)
    words = (dtype, place, str(views or 0))
    code, found = evaluated(job, "embed", *words, nproc=None if named_hosts else ranks, hosts=named_hosts)
    if code:
        return code
    examples = found.pop("examples")
    _say_bad(found["bad_samples"], examples)
    about = {"checkpoint": checkpoint, "model": job.model.name, "pretrained": job.model.pretrained}
    print_json({**about, **found, "seconds": round(time.monotonic() - start, 1)})
    return EXIT_DONE


def _place(out: str | None) -> str:
    """Returns the absolute folder, or the address, of --out; "" without one.

    Raises InputError if object storage does not take files there.
    """
    from trainer.config import is_remote
    from trainer.data.store import check_writable

    if out is None:
        return ""
    if not is_remote(out):
        return os.path.abspath(out)
    check_writable(out)
    return out


def _say_bad(bad: Mapping[str, int], examples: list[Any]) -> None:
    if bad:
        from trainer.data.bad_samples import in_words

        say(f"{many(sum(bad.values()), 'bad sample')} without features ({in_words(bad)})")
        for example in examples:
            say(f"  {example}")
