"""Runs one rank of a job, however it was started: `python -m trainer.train JOB`."""

from trainer.train.main import command

if __name__ == "__main__":
    command()
