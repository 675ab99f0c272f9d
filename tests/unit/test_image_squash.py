"""Files of images for pyxis: how `clipship image squash` makes one, and which one a job then starts from.

A stand-in answers in place of Docker's command, and scripts in those of mksquashfs, unsquashfs, enroot and
docker; `tests/cluster/image` has the real ones.
"""

import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from tests.support.refusals import refusal
from trainer.config import Job
from trainer.errors import ClusterError
from trainer.image import builder
from trainer.image.squash import squash
from trainer.launch.slurm.image_file import with_image_file

Programs = Callable[[str, str], None]
Capture = pytest.CaptureFixture[str]

TAG = "registry.example/team/clipship:0.1"
ID, PUSHED, OTHER = ("sha256:" + digit * 64 for digit in "abc")
KEEP = '/bin/cat >"$2"'
"""Script that stands in for mksquashfs."""


class Daemon:
    """Answers as the docker command of a daemon with one image, whose export has these chunks."""

    def __init__(self) -> None:
        self.image: dict[str, Any] = {"Id": ID, "RepoDigests": [], "Size": 6, "Config": {}}
        self.chunks: Callable[[], Iterator[bytes]] = lambda: iter([b"abc", b"def"])
        self.put: list[bytes] = []
        self.created: list[str] = []
        self.removed = 0

    def ask(self, *words: str, stdin: bytes = b"", **_: str) -> "subprocess.CompletedProcess[str]":
        if words[0] == "create":
            self.created.append(words[-2])
        elif words[0] == "cp":
            self.put.append(stdin)
        elif words[0] == "rm":
            self.removed += 1
        return subprocess.CompletedProcess(words, 0, json.dumps([self.image]), "")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Makes a program of a script; PATH has no others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    make("mksquashfs", KEEP)
    make("unsquashfs", ":")
    return make


@pytest.fixture
def docker(programs: object, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    found = Daemon()

    monkeypatch.setattr(builder, "client", lambda: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(builder.Classic, "_ask", lambda _, *words, **options: found.ask(*words, **options))
    monkeypatch.setattr(builder.Classic, "_chunks", lambda *_: (chunk for chunk in found.chunks()))
    return found


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


def job(images: Path, tag: str = TAG, **slurm: Any) -> Job:
    section = {"container": "pyxis", "image_dir": str(images), **slurm}
    resources = {"nodes": 2, "gpus_per_node": 4}
    return tiny_job(image={"tag": tag}, slurm=section, resources=resources, optim={"global_batch_size": 64})


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_file_has_what_enroot_reads_of_an_image(docker: Daemon, images: Path) -> None:
    start = {"WorkingDir": "/work space", "Entrypoint": ["/entry point"], "Cmd": ["say", "it's"]}
    docker.image["Config"] = {"Env": ["PATH=/opt/bin:/bin", "A=b c"], "Volumes": {"/data": {}}, **start}
    squash(job(images))
    with tarfile.open(fileobj=io.BytesIO(docker.put[0])) as tar:
        found = {entry.name: tar.extractfile(entry).read().decode() for entry in tar}  # type: ignore[union-attr]
    assert found["etc/environment"] == "PATH=/opt/bin:/bin\nA=b c\n"
    assert found["etc/fstab"] == "${ENROOT_ROOTFS}/data /data none x-create=dir,bind,rw,nosuid,nodev\n"
    assert found["etc/rc.local"] == ""
    assert found["etc/rc"].splitlines()[1:] == [
        f"# enroot-provenance: dockerd://{TAG}",
        "mkdir -p '/work space' 2>/dev/null",
        "cd '/work space' && unset OLDPWD || exit 1",
        "[ ! -s /etc/rc.local ] || . /etc/rc.local",
        """[ $# -gt 0 ] || set -- say 'it'"'"'s'""",
        """exec '/entry point' "$@\"""",
    ]


@pytest.mark.parametrize(
    ("program", "script", "said"),
    [
        ("mksquashfs", f"{KEEP}; echo 'No space left' >&2; exit 1", r"exit code 1 .*:\nNo space left"),
        ("mksquashfs", "exec 0<&-; echo 'no zstd' >&2; exit 1", r"needed is squashfs-tools 4.5 (.|\n)*zstd"),
        ("unsquashfs", "echo 'corruption detected' >&2; exit 1", "cannot be read back: corruption detected"),
    ],
    ids=["full disk", "other version", "not readable"],
)
def test_what_could_not_be_made_whole_is_not_there(
    docker: Daemon, images: Path, programs: Programs, program: str, script: str, said: str
) -> None:
    docker.chunks = lambda: iter([bytes(2**20)] * 4)  # more than a pipe holds
    programs(program, script)
    with pytest.raises(ClusterError, match=said):
        squash(job(images))
    assert entries(images) == []
    assert docker.removed == 1
    assert with_image_file(job(images))[0].slurm.image is None


def test_an_export_that_breaks_off_leaves_nothing(
    docker: Daemon, images: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs("docker", "echo abc; exit 1")
    monkeypatch.setattr(builder.Classic, "_chunks", builder.Builder._chunks)
    with pytest.raises(ClusterError, match="docker ended with exit code 1 while it exported an image"):
        squash(job(images))
    assert entries(images) == []
    assert docker.removed == 1


def test_of_two_that_make_a_file_at_once_the_first_one_s_stays(
    docker: Daemon, images: Path, capsys: Capture
) -> None:
    first: list[Path] = []

    def chunks() -> Iterator[bytes]:
        docker.chunks = lambda: iter([b"first"])
        yield b"second"
        first.append(squash(job(images)))

    docker.chunks = chunks
    assert squash(job(images)) == first[0]
    assert first[0].read_bytes() == b"first"
    assert entries(images) == [first[0].parent.name]
    assert "another command has made this file meanwhile" in capsys.readouterr().err


def test_a_file_that_is_there_is_not_made_again_and_learns_its_further_names(
    docker: Daemon, images: Path
) -> None:
    path = squash(job(images))
    docker.image["RepoDigests"] = [f"registry.example/team/clipship@{PUSHED}"]
    by_digest = f"registry.example/team/clipship@{PUSHED}"
    docker.chunks = lambda: iter([b"another"])
    assert squash(job(images, by_digest)) == path
    assert path.read_bytes() == b"abcdef"
    for tag in (TAG, by_digest):
        assert with_image_file(job(images, tag))[0].slurm.image == str(path)


def test_what_a_killed_command_left_and_a_file_of_another_size_are_not_taken_and_made_again(
    docker: Daemon, images: Path
) -> None:
    path = squash(job(images))
    path.parent.rename(images / f".{path.parent.name}.partial-01234567")
    assert with_image_file(job(images))[0].slurm.image is None
    assert squash(job(images)) == path
    path.write_bytes(b"abc")
    same, said = with_image_file(job(images))
    assert same.slurm.image is None
    assert said.startswith(f"{images} has no file of {TAG}, so that each of 2 nodes imports the image")
    assert squash(job(images)).read_bytes() == b"abcdef"


def test_a_full_disk_is_told_before_anything_is_made(
    docker: Daemon, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker.image["Size"] = 9 * 10**9
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * 10**9))
    with pytest.raises(ClusterError, match=r"has 2.0 GB free, and the image has 9.0 before .* --any-disk"):
        squash(job(images))
    assert docker.created == []
    assert squash(job(images), any_disk=True).is_file()


def test_without_mksquashfs_its_package_is_named(
    docker: Daemon, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "mksquashfs is not on PATH: install squashfs-tools 4.5" in refusal(squash, job(images))


@pytest.mark.parametrize("sections", [{"slurm": {"container": "pyxis"}}, {"image": {}}])
def test_without_a_folder_or_an_image_the_keys_are_named(sections: dict[str, Any], images: Path) -> None:
    whole = {"image": {"tag": TAG}, "slurm": {"container": "pyxis", "image_dir": str(images)}}
    for table in (whole | sections, whole | {"slurm": {"container": "pyxis", "image_dir": "/nowhere"}}):
        assert "image.tag = " in refusal(squash, tiny_job(**table))


ENROOT = """\
case $1 in
digest) echo "$*" >>{log}; echo {digest} ;;
import) echo "$* $ENROOT_SQUASH_OPTIONS" >>{log}; echo whole >"$5" ;;
esac"""


def test_without_the_daemon_s_image_enroot_takes_it_from_the_registry(
    images: Path, programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise ClusterError("Docker is not installed")

    monkeypatch.setattr(builder, "client", refused)
    with pytest.raises(ClusterError, match="Docker is not installed; or run this where enroot is installed"):
        squash(job(images))
    log = tmp_path / "log"
    programs("enroot", ENROOT.format(log=log, digest=PUSHED))
    path = squash(job(images))
    assert path == images / "clipship-bbbbbbbbbbbb/image.sqsh"
    asked, imported = log.read_text().splitlines()
    assert asked == "digest --arch x86_64 docker://registry.example#team/clipship:0.1"
    assert imported.startswith("import --arch x86_64 --output ")
    assert imported.endswith(
        f" docker://registry.example#team/clipship@{PUSHED} -comp zstd -Xcompression-level 3"
    )
    programs("enroot", "echo 'no such command' >&2; exit 1")
    with pytest.raises(ClusterError, match=r"no such command \(enroot 4.1 or newer is needed"):
        squash(job(images, "registry.example/team/other:1"))
    programs("enroot", "exec /bin/sleep 60")
    monkeypatch.setattr("trainer.image.squash._ANSWER_S", 0.2)
    with pytest.raises(ClusterError, match=r"enroot digest .* has not ended after 0\.2 s"):
        squash(job(images, "registry.example/team/other:1"))


@pytest.fixture
def there(docker: Daemon, images: Path) -> Path:
    """The path of the file of the image, as it is before a push."""
    return squash(job(images))


def test_a_job_starts_from_the_file_of_its_image(there: Path, images: Path, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(f"""\
name = "mine"
data = {{ format = "synthetic" }}
model.name = "ViT-S-32-alt"
optim = {{ global_batch_size = 32, epochs = 2 }}
image.tag = "{TAG}"
slurm = {{ container = "pyxis", gpus = "none", image_dir = "images" }}
""")
    _, script, said = clipship("render", "slurm", tmp_path / "job.toml", code=0)
    assert f"--container-image={there} " in script
    assert f'image = "{there}"' in script
    assert "image_dir" not in script
    assert f"clipship: {there} (0.00 GB, of 20" in said
    assert f"holds {TAG}, so that none of 1 node imports it; if the name means another image by now" in said
    said = " ".join(clipship("check", tmp_path / "job.toml", "--no-data", code=0).out.split())
    assert f"image {TAG} (torch " in said
    assert f"; {there} (0.00 GB" in said
    there.unlink()
    _, script, said = clipship("render", "slurm", tmp_path / "job.toml", code=0)
    assert "--container-image='registry.example#team/clipship:0.1'" in script
    assert "`clipship image squash JOB` makes the file, once for all" in said


@pytest.mark.parametrize(
    ("tag", "answer", "taken", "said"),
    [
        (TAG, f"echo {ID} registry.example/team/clipship@{PUSHED}", True, "none of 2 nodes imports it"),
        (
            TAG,
            f"echo {OTHER}",
            False,
            f"no file of {TAG} as docker has it here, {OTHER}: {{there}} is another",
        ),
        (f"registry.example/team/clipship@{ID}", "", True, "imports it"),
        (f"registry.example/team/clipship@{OTHER}", "", False, "has no file of registry.example/team/clipsh"),
    ],
    ids=["docker has the same", "docker has another", "its digest", "another digest"],
)
def test_the_file_of_another_image_of_that_name_is_not_taken_in_silence(
    there: Path, images: Path, programs: Programs, tag: str, answer: str, taken: bool, said: str
) -> None:
    if answer:
        programs("docker", answer)
    found, told = with_image_file(job(images, tag))
    assert found.slurm.image == (str(there) if taken else None)
    assert said.format(there=there) in told
    assert told.endswith("imports it") == taken


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tags": 1, "digests": [], "bytes": 6, "made": ""}'])
def test_a_record_that_cannot_be_read_is_none(there: Path, images: Path, text: str) -> None:
    there.with_name("image.json").write_text(text)
    assert with_image_file(job(images))[0].slurm.image is None
