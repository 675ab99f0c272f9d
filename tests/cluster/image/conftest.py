"""One daemon, one base and one image for all tests of the image."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.image import daemon
from tests.cluster.image.images import Built, build, write_job

DEFAULT = "clipship-test:openmpi4"


@pytest.fixture(scope="session")
def docker_folder() -> Iterator[Path]:
    """A running daemon, and a folder on the same disk.

    What is missing fails the tests: nobody asks for them by chance.
    """
    if missing := [
        name for name in ("docker", "dockerd", "debootstrap", "docker-registry") if shutil.which(name) is None
    ]:
        pytest.fail(f"{', '.join(missing)} not found: `make test-image` installs Debian's packages")
    folder = Path(tempfile.mkdtemp(prefix="clipship-image-", dir="/var/tmp"))
    try:
        with daemon.daemon(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def bookworm(docker_folder: Path) -> str:
    return daemon.base("bookworm", docker_folder)


@pytest.fixture(scope="session")
def default_image(docker_folder: Path, bookworm: str) -> Built:
    """The default stack, built by `clipship image build`."""
    return build(write_job(docker_folder, DEFAULT, bookworm, "debian-12"), DEFAULT)
