"""The Dockerfile of a job. Pure: uses no clock, no network and no daemon."""

from trainer.config import Job
from trainer.image.recipe import recipe
from trainer.launch.templates import render


def dockerfile(job: Job) -> str:
    """Returns the text that `docker build` takes.

    Raises InputError that lists everything that cannot work.
    """
    return render("docker/Dockerfile.j2", recipe=recipe(job))
