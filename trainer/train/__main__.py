"""Runs one rank of a job, however it was started: `python -m trainer.train JOB`."""

import sys

from trainer.model.light_import import import_open_clip

import_open_clip(sys.argv[1:])

from trainer.train.main import command  # noqa: E402

if __name__ == "__main__":
    command()
