"""The Dockerfile of a job. Pure: no clock, no network, no daemon."""

from trainer.job import Job
from trainer.launch.image.recipe import recipe
from trainer.launch.templates import render


def dockerfile(job: Job) -> str:
    """The text that `docker build` takes. Raises InputError listing what cannot work."""
    return render("docker/Dockerfile.j2", recipe=recipe(job))
