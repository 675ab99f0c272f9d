"""`clipship image squash` with the Docker daemon and mksquashfs: what the file has, and what it leaves out.

The image is a few files, among them what users without root cannot unpack.
"""

import io
import json
import random
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w

from tests.cluster.image import daemon
from tests.cluster.image.daemon import docker
from tests.cluster.image.images import clipship

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

TAG, RANDOM = "clipship-test-squash:1", "clipship-test-squash:random"
BIG = bytes(range(256)) * 2**14
"""4 MiB, more than one block of a squashfs file and than a pipe holds."""


def _entry(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = kind, 0o755
    for field, value in fields.items():
        setattr(entry, field, value)
    return entry


def _root() -> bytes:
    """Returns the tar of a small root file system."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for folder in ("dev", "etc", "opt", "work space"):
            tar.addfile(_entry(folder, tarfile.DIRTYPE, mode=0o555))
        tar.addfile(_entry("dev/null", tarfile.CHRTYPE, devmajor=1, devminor=3))
        tar.addfile(_entry("etc/fstab", size=11), io.BytesIO(b"/dev/sda1 /"))
        tar.addfile(_entry("opt/tool", size=len(BIG), uid=1000, gid=1000, mode=0o4755), io.BytesIO(BIG))
        tar.addfile(_entry("opt/same", tarfile.LNKTYPE, linkname="opt/tool"))
        tar.addfile(_entry("opt/link", tarfile.SYMTYPE, linkname="/nowhere"))
    return written.getvalue()


@pytest.fixture
def job(docker_folder: Path, tmp_path: Path) -> Iterator[Path]:
    """A job file that names the image, which the daemon has, and an empty folder for files."""
    changes = ['ENV A="b c"', "WORKDIR /work space", "USER 1000", 'CMD ["/opt/tool"]']
    options = [word for change in changes for word in ("--change", change)]
    subprocess.run(["docker", "import", *options, "-", TAG], input=_root(), check=True)
    (tmp_path / "images").mkdir()
    table = {
        "name": "squash-test",
        "data": {"format": "synthetic", "synthetic_samples": 64},
        "optim": {"global_batch_size": 16, "steps": 1, "warmup_steps": 0},
        "image": {"tag": TAG},
        "slurm": {"container": "pyxis", "image_dir": "images", "gpus": "none"},
    }
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps(table))
    yield path
    subprocess.run(["docker", "rmi", "--force", TAG, RANDOM], capture_output=True, check=False)


def test_the_file_has_the_images_files_and_what_enroot_reads(job: Path) -> None:
    if shutil.which("mksquashfs") is None:
        pytest.fail("mksquashfs not found: `make test-image` installs Debian's packages")
    before = daemon.images()
    done = clipship("image", "squash", str(job), code=0)
    file = Path(done.stdout.strip())
    identity = docker("image", "inspect", "--format={{.Id}}", TAG).strip()
    assert file == job.parent / f"images/clipship-test-squash-{identity[7:19]}/image.sqsh"
    made = json.loads(file.with_name("image.json").read_text())
    assert (made["tags"], made["bytes"]) == ([TAG], file.stat().st_size)
    assert identity in made["digests"]
    assert docker("ps", "--all", "--quiet", f"--filter=ancestor={TAG}") == ""
    assert daemon.images() == before

    out = job.parent / "out"
    subprocess.run(["unsquashfs", "-no-progress", "-d", str(out), str(file)], check=True)
    assert (out / "opt/tool").read_bytes() == BIG
    assert (out / "opt/tool").stat().st_uid == 0
    assert (out / "opt/same").samefile(out / "opt/tool")
    assert (out / "opt/link").readlink() == Path("/nowhere")
    assert list((out / "dev").iterdir()) == []
    assert not (out / ".dockerenv").exists()
    assert (out / "etc/fstab").read_text() == ""
    assert "A=b c\n" in (out / "etc/environment").read_text()
    rc = (out / "etc/rc").read_text()
    assert "cd '/work space' && unset OLDPWD || exit 1\n" in rc
    assert rc.endswith('[ $# -gt 0 ] || set -- /opt/tool\nexec  "$@"\n')
    superblock = subprocess.run(["unsquashfs", "-s", str(file)], capture_output=True, text=True, check=True)
    assert "Compression zstd" in superblock.stdout

    again = clipship("image", "squash", str(job))
    assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr
    assert "is there already" in again.stderr
    rendered = clipship("render", "slurm", str(job))
    assert f"--container-image={file} " in rendered.stdout, rendered.stderr
    assert rendered.stderr.splitlines()[0].endswith(f"holds {TAG}, so that none of 1 node imports it")


def test_a_disk_that_becomes_full_leaves_nothing(job: Path, tmp_path: Path) -> None:
    """The folder is on a file system of its own, of one MiB."""
    folder = tmp_path / "images"
    size = ["-o", "size=1m", "tmpfs", str(folder)]
    subprocess.run(["mount", "-t", "tmpfs", *size], check=True)
    try:
        refused = clipship("image", "squash", str(job))
        full = clipship("image", "squash", str(job), "--any-disk", "--set", f"image.tag={_random_image()}")
        left = list(folder.iterdir())
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert refused.returncode == 1
    assert f"{folder} has 0.0 GB free, and the image has 0.0" in refused.stderr
    assert full.returncode == 1
    assert "mksquashfs ended with exit code 1" in full.stderr
    assert left == []


def _random_image() -> str:
    """Makes an image of bytes that cannot be compressed; returns its name."""
    content = random.Random(1).randbytes(2**21)
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        tar.addfile(_entry("random", size=len(content)), io.BytesIO(content))
    subprocess.run(["docker", "import", "-", RANDOM], input=written.getvalue(), check=True)
    return RANDOM
