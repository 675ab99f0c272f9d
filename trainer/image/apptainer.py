"""The definition file of a job's image for Apptainer, and the commands by which enroot takes the image.

Pure: uses no clock, no network and no daemon.
"""

from trainer.config import Job
from trainer.config.image_name import for_enroot
from trainer.errors import InputError
from trainer.image.recipe import recipe
from trainer.launch.templates import render


def definition(job: Job) -> str:
    """Returns the text that `apptainer build` takes.

    Raises InputError if the job names no image, or one that cannot work.
    """
    tag = job.image.tag
    if tag is None:
        raise InputError(
            "image.tag: missing; it names the image that Apptainer converts, as "
            "registry.example/team/clipship:1"
        )
    stem = tag.partition("@")[0].rpartition("/")[2].replace(":", "-")
    return render(
        "docker/apptainer.def.j2",
        recipe=recipe(job),
        tag=_with_tag(tag),
        sif=f"{stem}.sif",
        sqsh=f"{stem}.sqsh",
        enroot=for_enroot(tag),
    )


def _with_tag(reference: str) -> str:
    """Returns the image's name with a tag or a digest, one of which Apptainer requires.

    Without either the tag is latest.
    """
    return reference if "@" in reference or ":" in reference.rpartition("/")[2] else f"{reference}:latest"
