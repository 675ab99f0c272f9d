"""The squashfs files in slurm.image_dir, one folder for each image: which of them a job's ranks start from.

`clipship image squash` makes them. Imports no torch.
"""

import datetime
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.config import Job
from trainer.config.builders import asked
from trainer.launch.commands import answer_of
from trainer.safe_io.atomic import write_json
from trainer.safe_io.plain import read_json
from trainer.text.wording import many

_FILE = "image.sqsh"
_RECORD = "image.json"
_SHORT = 12
"""Hexadecimal digits of a digest in the name of a folder, as many as `docker images` shows."""
_ANSWER_LIMIT_S = 10


@dataclass(frozen=True)
class ImageFile:
    """A squashfs file of an image, as the record beside it describes it."""

    path: Path
    tags: frozenset[str]
    """Values of image.tag for which the file was made."""
    digests: frozenset[str]
    """Digests by which the image is known, sha256:...: its id in a Docker daemon, that of a registry."""
    bytes: int
    made: str
    """Time of the record, in UTC (ISO 8601)."""


def path_of(image_dir: Path, tag: str, digest: str) -> Path:
    """Returns the path of an image's file: NAME-DIGEST/image.sqsh."""
    name = tag.partition("@")[0].rpartition("/")[2].partition(":")[0]
    return image_dir / f"{name}-{digest.partition(':')[2][:_SHORT]}" / _FILE


def record(path: Path, tags: Iterable[str], digests: Iterable[str]) -> None:
    """Write the record beside a file that is whole. Raises OSError."""
    made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    names = {"tags": sorted({*tags}), "digests": sorted({*digests})}
    write_json(path.with_name(_RECORD), {**names, "bytes": path.stat().st_size, "made": made})


def file_in(folder: Path) -> ImageFile | None:
    """Returns the folder's file; None if there is none, or none of the size that was recorded."""
    path = folder / _FILE
    try:
        fields = read_json(folder / _RECORD)
        tags, digests = (frozenset(map(str, fields[name])) for name in ("tags", "digests"))
        size = path.stat().st_size
        return ImageFile(path, tags, digests, size, str(fields["made"])) if size == fields["bytes"] else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def with_image_file(job: Job) -> tuple[Job, str]:
    """Returns the job with slurm.image set to the file of its image, and a sentence that says so.

    Without such a file it is the same job, and the sentence says how to make one. "" if the job names no
    slurm.image_dir.
    """
    if job.slurm.image_dir is None or job.image.tag is None:
        return job, ""
    found, why = _choose(Path(job.slurm.image_dir), job.image.tag, job.image.builder)
    nodes = many(job.resources.nodes + job.recovery.spare_nodes, "node")
    if found is None:
        return job, (
            f"{why}, so that each of {nodes} imports the image from its registry unless its cache has it: "
            "`clipship image squash JOB` makes the file, once for all"
        )
    size = f"{found.bytes / 1e9:,.2f} GB, of {found.made[:10]}"
    slurm = job.slurm.model_copy(update={"image": str(found.path), "image_dir": None})
    return job.model_copy(update={"slurm": slurm}), (
        f"{found.path} ({size}) holds {job.image.tag}, so that none of {nodes} imports it{why}"
    )


def _choose(image_dir: Path, tag: str, builder: str) -> tuple[ImageFile | None, str]:
    """Returns the file to start from, with what is not known of it; or None, with the reason."""
    try:
        folders = [folder for folder in image_dir.iterdir() if not folder.name.startswith(".")]
    except OSError as problem:
        return None, f"slurm.image_dir = {image_dir} cannot be read here ({problem.strerror})"
    files = sorted(filter(None, map(file_in, folders)), key=lambda found: found.made)
    digest = tag.partition("@")[2]
    now = {digest} if digest else _digests_here(tag, builder)
    tagged = [found for found in files if tag in found.tags]
    fitting = [found for found in files if found.digests & now] if now else tagged
    if not fitting:
        is_now = (
            f" as {asked(builder)[0]} has it here, {min(now)}: {tagged[-1].path} is another" if tagged else ""
        )
        return None, f"{image_dir} has no file of {tag}{is_now}"
    unknown = "; if the name means another image by now, that is not known here: a digest in it would say"
    return fitting[-1], "" if now else unknown


def _digests_here(tag: str, builder: str) -> set[str]:
    """Returns the digests of the image that its builder has here under the name; none if it has none."""
    try:
        answer = answer_of(*asked(builder), tag, timeout=_ANSWER_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    digests = {name.rpartition("@")[2] for name in answer.stdout.split()} if answer.returncode == 0 else set()
    return {name if ":" in name else f"sha256:{name}" for name in digests}  # podman's ids are bare
