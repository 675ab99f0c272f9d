"""The command `clipship fetch`: downloads what a job names on a hub, before its ranks start."""

import os
from pathlib import Path

import click

from trainer.cli.options import Command, job_argument, set_option
from trainer.text.live import waiting
from trainer.text.terminal import one_line, say


@click.command(cls=Command)
@job_argument
@set_option
def command(job_path: Path, overrides: tuple[str, ...]) -> None:
    """Download weights, tokenizer and text tower of JOB into model.cache_dir.

    Ranks of a cluster ask no hub (model.offline), so this comes first, on a machine that reaches one.
    HF_ENDPOINT names a mirror, and MODELSCOPE_ENDPOINT one of ModelScope. Without model.cache_dir, the folder
    is that of the hub's own programs (HF_HOME, MODELSCOPE_CACHE).
    A download that was cut off goes on with the same command; each file is compared with its checksum. stdout
    has a line for each part: what, bytes, path.

    Examples:
      clipship fetch job.toml
      clipship fetch job.toml --set model.cache_dir=/shared/weights
      HF_ENDPOINT=https://mirror.example clipship fetch job.toml
    """
    from trainer.config.loader import load_job
    from trainer.model.catalog import check_init, check_model, check_pretrained, check_tag
    from trainer.model.packages import check_packages

    job = load_job(job_path, overrides)
    check_model(job.model.name)
    check_pretrained(job.model.pretrained)
    check_tag(job.model.name, job.model.pretrained)
    check_init(job.model)
    check_packages(job)
    if job.model.cache_dir is None and job.schedulers:
        say(
            "model.cache_dir is not set, so nodes of the cluster find the files only if HF_HOME is a folder "
            "that they see too"
        )
    os.environ.pop("HF_HUB_OFFLINE", None)  # this command is the one that asks
    with waiting("loading torch"):
        from trainer.model.fetch import fetch

    nothing = True
    for part in fetch(job):
        click.echo(f"{part.what}  {part.size:,}  {one_line(str(part.path))}")
        nothing = False
    if nothing:
        say(f"{job_path} names nothing on a hub: there is nothing to fetch")
