"""Runs one rank of a job, however it was started: `python -m trainer.train JOB`."""

from trainer.sysinfo.imports import import_without

# timm, which open_clip imports, would import W&B for a function that nobody calls: half a second.
import_without("wandb", "open_clip")

from trainer.train.main import command  # noqa: E402

if __name__ == "__main__":
    command()
