"""podman and buildah, as root and as an ordinary user: each deed of their rows with a small image."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.image.builder_deeds import ADDED, REVISION, deeds
from tests.cluster.image.images import ROOT, clipship, write_job
from tests.cluster.image.storage import Storage, manifest, ordinary_user, registry, storage, tiny_base

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]

NAMES = ["podman", pytest.param("buildah", marks=pytest.mark.full)]
BASE = "clipship-test-tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that everybody may enter."""
    if missing := [name for name in ("podman", "buildah", "docker-registry") if shutil.which(name) is None]:
        pytest.fail(f"{', '.join(missing)} not found: `make test-image` installs Debian's packages")
    made = Path("/var/tmp") / f"clipship-builders-{os.getpid()}"
    made.mkdir(mode=0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module", params=["root", "user"])
def place(folder: Path, request: pytest.FixtureRequest) -> Iterator[Storage]:
    """The storage of root or of a user, with the small base in it."""
    inside = folder / request.param
    inside.mkdir()
    if request.param == "root":
        with storage(inside, None) as made:
            yield _with_base(made)
        return
    with ordinary_user() as user, storage(inside, user) as made:
        yield _with_base(made)


def _with_base(made: Storage) -> Storage:
    file = made.folder / "base.tar"
    file.write_bytes(tiny_base())
    made.must("podman", "import", str(file), BASE)
    return made


@pytest.mark.parametrize("form", ["zstd", pytest.param("zstd:chunked", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", NAMES)
def test_a_builder_without_a_daemon_does_what_docker_does(place: Storage, name: str, form: str) -> None:
    secret = place.folder / "pip.conf"
    secret.write_text("a password")
    secret.chmod(0o644)
    with registry(place.folder) as address:
        tag = f"{address}/team/{name}:1"
        site = {"pip_conf": str(secret)}
        job = write_job(place.folder, tag, BASE, "debian-12", builder=name, site=site, compression=form)
        told = deeds(job, place.variables, place.user)
        digest, written = manifest(address, f"team/{name}", "1")
        shutil.rmtree(place.folder / "registry")  # a registry's gzip layers would be taken again
    assert [*(place.folder / "temporary").iterdir()] == []
    assert told["folder"] == str(place.folder / "graph")
    assert told["labels"]["org.opencontainers.image.revision"] == REVISION
    assert "A=b" in told["env"]
    assert (told["code"], told["errors"].splitlines()[0]) == (3, "err")
    assert "1048576" in told["output"]  # KiB of shared memory
    assert "eth" not in told["output"]
    assert {ADDED, "opt/id", "usr/bin/true"} <= {*told["names"]}
    assert "read" not in told["names"]
    assert "there is no image clipship-test-none:1 on this machine" in told["missing"]
    assert "likely cause: podman and buildah ask no registry for a short name" in told["failed"]
    assert told["pushed"] == digest
    assert written["config"]["digest"] == told["id"]
    assert {layer["mediaType"].rpartition("+")[2] for layer in written["layers"]} == {"zstd"}
    of_files = [
        any("zstd-chunked" in key for key in layer.get("annotations", {})) for layer in written["layers"]
    ]
    assert {*of_files} == {form == "zstd:chunked"}  # a list of files, by which a node takes some of a layer


@pytest.mark.parametrize("name", NAMES)
def test_squash_takes_the_image_from_its_builder(folder: Path, name: str) -> None:
    inside = folder / f"squash-{name}"
    (inside / "images").mkdir(parents=True)
    with storage(inside, None) as made:
        _with_base(made)
        job = write_job(inside, BASE, BASE, "debian-12", builder=name)
        job.write_text(
            job.read_text() + '[slurm]\ncontainer = "pyxis"\nimage_dir = "images"\ngpus = "none"\n'
        )
        done = clipship("image", "squash", str(job), root=ROOT, **made.variables, code=0)
        rendered = clipship("render", "slurm", str(job), code=0, root=ROOT, **made.variables)
    listed = subprocess.run(["unsquashfs", "-l", done.stdout.strip()], capture_output=True, text=True).stdout
    assert {"squashfs-root/etc/rc", "squashfs-root/usr/bin/true"} <= {*listed.split()}
    assert f"--container-image={done.stdout.strip()} " in rendered.stdout, rendered.stderr
    assert "that is not known here" not in rendered.stderr, "the builder's own image was compared"
