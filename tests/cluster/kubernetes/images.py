"""Builds the images that the tests run in, and hands each to a command:
`python -m tests.cluster.kubernetes.images COMMAND [WORD ...]`.

The command gets the image's name as its last word and brings it to the cluster: `cluster load`,
`kind load docker-image`, ...
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cluster.image import daemon
from tests.cluster.image.images import build, write_job
from tests.cluster.kubernetes.conftest import IMAGES

MPI = {"openmpi4": "debian", "openmpi5": "pypi"}
PACKAGES = Path(__file__).parents[1] / "image" / "packages.sh"


def main(command: list[str]) -> None:
    subprocess.run([PACKAGES], check=True)
    with (
        tempfile.TemporaryDirectory(prefix="clipship-images-", dir="/var/tmp") as folder,
        daemon.daemon(Path(folder)),
    ):
        base = daemon.base("bookworm", Path(folder))
        for name, tag in IMAGES.items():
            build(write_job(Path(folder), tag, base, "debian-12", name=f"{name}.toml", mpi=MPI[name]), tag)
            subprocess.run([*command, tag], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
