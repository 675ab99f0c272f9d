"""The definition file of a job's image for Apptainer, and how enroot takes the image. Pure: no clock, no network, no daemon."""

from trainer.errors import InputError
from trainer.job import Job
from trainer.launch.image.names import for_enroot
from trainer.launch.image.recipe import recipe
from trainer.launch.templates import render


def definition(job: Job) -> str:
    """The text that `apptainer build` takes. Raises InputError where the job names no image, or one that cannot work."""
    tag = job.image.tag
    if tag is None:
        raise InputError("image.tag: missing; it names the image that Apptainer converts, as registry.example/team/clipship:1")
    stem = tag.partition("@")[0].rpartition("/")[2].replace(":", "-")
    return render(
        "docker/apptainer.def.j2", recipe=recipe(job), tag=_with_tag(tag), sif=f"{stem}.sif", sqsh=f"{stem}.sqsh", enroot=for_enroot(tag)
    )


def _with_tag(reference: str) -> str:
    """Apptainer asks for a tag or a digest."""
    return reference if "@" in reference or ":" in reference.rpartition("/")[2] else f"{reference}:latest"
