"""The command `clipship image`: builds, verifies and publishes the container image of a job."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import Group, NearChoice, job_argument, set_option
from trainer.cli.output import print_json
from trainer.config.builders import ABILITIES
from trainer.text.paste import command as paste
from trainer.text.terminal import say
from trainer.text.wording import many

if TYPE_CHECKING:
    from trainer.config import Job

_builder = click.option(
    "--builder",
    type=NearChoice(("auto", *ABILITIES)),
    default="auto",
    show_default=True,
    help="The one that has the image; auto: the Docker daemon, else podman or buildah.",
)


@click.group(cls=Group)
def command() -> None:
    """Build, verify and publish the container image of a job.

    Examples:
      clipship image build job.toml
      clipship image verify clipship/train:0.1
    """


def _load(job_path: Path, overrides: tuple[str, ...]) -> "Job":
    from trainer.config.loader import load_job
    from trainer.errors import InputError

    job = load_job(job_path, overrides)
    if not job.resources.row.runs_cuda:
        raise InputError(
            "clipship makes images for CUDA alone, and resources.accelerator = "
            f'"{job.resources.accelerator}": name an image of your own, with Clipship and that torch in it, '
            "in image.tag"
        )
    return job


def _say_what_is_left_out() -> None:
    from trainer.image.source import left_out

    if names := left_out():
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        say(f"warning: git does not track {shown}: the image is built without them (git add)")


@command.command()
@job_argument
@set_option
@click.option("--any-disk", is_flag=True, help="Do not check that the builder's disk has enough space.")
@click.option(
    "--sbom",
    metavar="VALUE",
    help="Let BuildKit attach a list of the packages; VALUE is docker build's: true, generator=IMAGE.",
)
@click.option(
    "--provenance",
    metavar="VALUE",
    help="Let BuildKit attach how the image was built; VALUE is docker build's: true, mode=max.",
)
def build(
    job_path: Path, overrides: tuple[str, ...], any_disk: bool, sbom: str | None, provenance: str | None
) -> None:
    """Build JOB's image with Docker, podman or buildah; prints its id."""
    from trainer.image.build import build as build_image

    _say_what_is_left_out()
    given = {"--sbom": sbom, "--provenance": provenance}
    attest = [f"{name}={value}" for name, value in given.items() if value is not None]
    click.echo(build_image(_load(job_path, overrides), any_disk=any_disk, attest=attest))


@command.command()
@job_argument
@click.argument("folder", type=click.Path(path_type=Path))
@set_option
def context(job_path: Path, folder: Path, overrides: tuple[str, ...]) -> None:
    """Write Dockerfile and all files of JOB's image to FOLDER, for a builder of your own."""
    from trainer.image import context as contexts
    from trainer.image.build import build_command

    job = _load(job_path, overrides)
    _say_what_is_left_out()
    contexts.write_folder(contexts.context(job), folder)
    click.echo(f"wrote {folder}; for example: {paste(*build_command(job, folder))}", err=True)


@command.command()
@click.argument("image", metavar="IMAGE")
@_builder
def verify(image: str, builder: str) -> None:
    """Verify IMAGE again: Horovod, one NCCL, a model, two ranks under mpirun and clipship run.

    The facts found are printed as JSON.
    """
    from trainer.errors import ClusterError
    from trainer.image.verify import OF_BASE
    from trainer.image.verify import verify as verify_image

    stack, facts, row = verify_image(image, builder)
    print_json({"stack": stack, **facts}, pretty=True)
    if stack == OF_BASE:
        sentence = (
            f"stack base: torch {facts['torch']}, CUDA {facts['cuda']}, NCCL {facts['nccl']}, as the "
            "image's base brought them"
        )
        click.echo(sentence, err=True)
    elif row is not None:
        click.echo(
            f"stack {row.torch}: CUDA {row.cuda}, NCCL {row.nccl}; `clipship stacks explain {row.torch}` "
            "says more",
            err=True,
        )
    else:
        raise ClusterError(
            f"{image} works, but no stack in the table has torch {facts['torch']} with CUDA "
            f"{facts['cuda']} and NCCL {facts['nccl']}"
        )


@command.command()
@click.argument("image", metavar="IMAGE")
@_builder
def sbom(image: str, builder: str) -> None:
    """List the packages installed in IMAGE, one per line: origin, name, version, licence.

    Tabs stand between the columns, and the order is fixed.
    """
    from trainer.image.verify import packages

    click.echo(packages(image, builder), nl=False)


@command.command()
@job_argument
@set_option
def push(job_path: Path, overrides: tuple[str, ...]) -> None:
    """Send JOB's image to the registry in its name; prints the name with its digest, for image.tag."""
    from trainer.image.build import push as push_image

    click.echo(push_image(_load(job_path, overrides)))


@command.command()
@job_argument
@click.argument("folder", type=click.Path(path_type=Path))
@set_option
def wheelhouse(job_path: Path, folder: Path, overrides: tuple[str, ...]) -> None:
    """Fill FOLDER with the packages that JOB's image needs from an index.

    With image.site.wheelhouse = FOLDER the image is then built without an index.
    """
    from trainer.image.wheelhouse import fill

    click.echo(f"{folder} has {many(fill(_load(job_path, overrides), folder), 'file')}", err=True)


@command.command()
@job_argument
@set_option
@click.option("--any-disk", is_flag=True, help="Do not check that slurm.image_dir has enough space.")
def squash(job_path: Path, overrides: tuple[str, ...], any_disk: bool) -> None:
    """Make the file in slurm.image_dir from which pyxis starts JOB's image; prints its path.

    No node then imports the image. It comes from this machine's builder, else by enroot from its registry.
    """
    from trainer.image.squash import squash as make

    click.echo(make(_load(job_path, overrides), any_disk=any_disk))
