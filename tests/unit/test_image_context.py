"""Context of an image build, the same bytes each time, and what is said of a build that fails."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.config import Job
from trainer.config.loader import dump_job, resolve_paths
from trainer.errors import InputError
from trainer.image import build, source
from trainer.image import context as contexts
from trainer.image.builder import likely_cause

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----\n"


def job_with(site: dict[str, Any], **image: Any) -> Job:
    return tiny_job(image={"tag": "clipship:1", "site": site, **image})


def test_the_same_job_gives_the_same_folder_without_caches_whatever_the_umask_is(tmp_path: Path) -> None:
    for name, mask in (("first", 0o077), ("second", 0o022)):
        before = os.umask(mask)
        contexts.write_folder(contexts.context(job_with({})), tmp_path / name)
        os.umask(before)
    first, second = ({path.relative_to(tmp_path / name): path.lstat().st_mode for path in
                      (tmp_path / name).rglob("*")} for name in ("first", "second"))  # fmt: skip
    assert first == second
    assert _contents(tmp_path / "first") == _contents(tmp_path / "second")
    assert not [path for path in first if "__pycache__" in path.parts]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what git tracks here, with files beside it that are nobody's business."""
    folder = tmp_path / "checkout"
    contexts.write_folder(source.source_files(), folder)
    strangers = "docker/token.txt trainer/id_rsa trainer/data/shard.tar trainer/scratch.py"
    for name in (*strangers.split(), "k8s/.env", "slurm/.env.partial"):
        (folder / name).write_text("hush")
    return folder


def _commit(folder: Path, names: Iterable[str]) -> None:
    """Makes a git repository that tracks these files."""
    for words in (["init", "--quiet"], ["add", "--", *names]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)


def test_untracked_files_of_a_checkout_stay_out_of_the_context(checkout: Path) -> None:
    tracked = source.source_files()
    _commit(checkout, tracked)
    assert source.source_files(checkout).keys() == tracked.keys()
    assert source.left_out(checkout) == ["docker/token.txt", "trainer/scratch.py"]
    (checkout / "trainer/world/launchers.py").unlink()
    assert tracked.keys() - source.source_files(checkout).keys() == {"trainer/world/launchers.py"}


def test_a_checkout_that_git_does_not_open_is_named(checkout: Path) -> None:
    (checkout / ".git").write_text("gitdir: nowhere\n")
    with pytest.raises(InputError, match="but git cannot list them: fatal: not a git repository"):
        source.source_files(checkout)


def test_an_installed_wheel_gives_the_files_of_its_checkout(tmp_path: Path) -> None:
    for name in ("checkout", "built"):  # building leaves files beside the source
        contexts.write_folder(source.source_files(), tmp_path / name)
    options = "--quiet --no-deps --no-index --no-build-isolation --no-compile --disable-pip-version-check"
    pip = [sys.executable, "-m", "pip", "install", *options.split(), "--root-user-action=ignore"]
    folders = ["--target", str(tmp_path / "site"), str(tmp_path / "built")]
    subprocess.run([*pip, *folders], check=True, timeout=240)
    (tmp_path / "site/trainer/scratch.py").write_text("hush")
    contexts.write_folder(source.source_files(tmp_path / "site"), tmp_path / "from-wheel")
    assert _contents(tmp_path / "from-wheel") == _contents(tmp_path / "checkout")


def _contents(root: Path) -> dict[str, bytes]:
    """Returns the bytes of each file below the folder; links are followed."""
    found = [Path(top, name) for top, _, names in os.walk(root, followlinks=True) for name in names]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def test_passwords_are_in_no_context(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://me:hush@index.example/simple\n")
    job = resolve_paths(job_with({"pip_conf": "pip.conf"}), tmp_path)
    contexts.write_folder(contexts.context(job), tmp_path / "context")
    assert not [name for name, content in _contents(tmp_path / "context").items() if b"hush" in content]


def test_a_wheelhouse_goes_along_with_what_its_links_lead_to_and_no_index_is_asked(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/a-1-py3-none-any.whl").write_bytes(b"wheel")
    (tmp_path / "kept.whl").write_bytes(b"linked")
    link = tmp_path / "wheels/b-1-py3-none-any.whl"
    link.symlink_to(tmp_path / "kept.whl")
    (tmp_path / "ours.pem").write_text(CERTIFICATE)
    job = resolve_paths(job_with({"wheelhouse": "wheels", "certificates": ("ours.pem",)}), tmp_path)
    entries = contexts.context(job)
    assert "site/wheelhouse/a-1-py3-none-any.whl" in entries
    conf = bytes(entries["site/pip.conf"])
    assert conf == b"[global]\ncert = /site/ca.pem\nno-index = true\nfind-links = /site/wheelhouse\n"
    contexts.write_folder(entries, tmp_path / "context")
    brought = tmp_path / "context/site/wheelhouse" / link.name
    assert not brought.is_symlink()
    assert brought.read_bytes() == b"linked"
    (tmp_path / "kept.whl").unlink()
    with pytest.raises(InputError, match=r"b-1-py3-none-any.whl is a link to a missing file"):
        contexts.context(job)


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ({"certificates": ("missing.pem",)}, "No such file"),
        ({"certificates": ("text",)}, "no certificate in PEM form"),
        ({"wheelhouse": "empty"}, "clipship image wheelhouse"),
    ],
)
def test_a_site_s_files_that_are_missing_or_wrong_are_named(
    tmp_path: Path, site: dict[str, Any], message: str
) -> None:
    (tmp_path / "text").write_text("not a certificate")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=message):
        contexts.context(resolve_paths(job_with(site), tmp_path))


@pytest.mark.parametrize("secret", ["pip_conf", "apt_auth"])
def test_a_file_with_passwords_that_is_missing_is_named_before_anything_is_built(secret: str) -> None:
    with pytest.raises(InputError, match=rf"image\.site\.{secret}: the file none does not exist"):
        build.build(job_with({secret: "none"}))


def test_a_context_where_nothing_can_be_written_is_refused() -> None:
    with pytest.raises(InputError, match="the context cannot be written to /proc/x"):
        contexts.write_folder(contexts.context(job_with({})), Path("/proc/x"))


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        contexts.write_folder(contexts.context(job_with({})), tmp_path)


def test_an_image_without_a_name_is_not_built() -> None:
    with pytest.raises(InputError, match=r"image\.tag: missing"):
        build.build(tiny_job())


def test_a_daemon_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(dump_job(job_with({})))
    command = [sys.executable, "-m", "trainer.cli.main", "image", "build", str(tmp_path / "job.toml")]
    env = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "Docker" in done.stderr


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("tar: write error: No space left on device", "disk is full"),
        ("cc1plus: fatal error: Killed signal terminated program cc1plus", "too little memory"),
        ("base: its torch 2.5.0 is built without CUDA", "the base cannot be used: its torch 2.5.0 is built"),
        ("tls: failed to verify certificate: x509: certificate signed by unknown authority", "certs.d"),
        ("NewConnectionError\nERROR: No matching distribution found for torch", "has no network"),
        ("NewConnectionError\nStep 4/9 : RUN x\nself-test: FAILED: nccl is 2.29.7", "nccl is 2.29.7"),
        ('Head "https://docker.io/v2/x": dial tcp: lookup docker.io: no such host', "image.base"),
        ("#9 [a 1/2] RUN x\n#9 CANCELED\n------\n > [b 5/6] RUN y:\n0.5 base: its torch is old", "is old"),
        ("E: Failed to fetch http://deb.example/x.deb  404  Not Found [IP: 1.2.3.4 80]", "try again later"),
        ("Err:4 https://deb.example bookworm InRelease\n  401  Unauthorized", "image.site.apt_auth"),
        ("ERROR: Cannot find command 'git' - do you have 'git' installed", 'apt_packages = ["git"]'),
        ('unable to prepare context: path "context" not found', "set it to one in your home"),
        ("something else went wrong", ""),
        ("Step 9/30 : RUN echo 'the base has an MPI of its own: image.mpi'", ""),
    ],
)
def test_a_failed_build_names_the_likely_cause_if_there_is_one(output: str, cause: str) -> None:
    found = likely_cause(f"Step 3/9\n{output}\n")
    assert cause in (found or "")
    assert bool(cause) == bool(found)
