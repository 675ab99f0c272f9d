"""Runs one rank of a job, however it was started: `python -m trainer.train JOB`."""

import sys

from trainer.model.light_import import import_open_clip
from trainer.run.job_limits import job_if_readable

import_open_clip(job_if_readable(sys.argv[1:]))  # what is wrong with a job, `command` says

from trainer.train.main import command  # noqa: E402

if __name__ == "__main__":
    command()
