"""Context of an image build: this checkout's code and the site's files, the same bytes each time.

Messages about a failed build are tested here, too.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.config import Job
from trainer.config.loader import dump_job, job_from_table, resolve_paths
from trainer.errors import InputError
from trainer.image import build, source
from trainer.image import context as contexts
from trainer.image.build_errors import likely_cause

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----\n"


def job_with(site: dict[str, Any], **image: Any) -> Job:
    return tiny_job(image={"tag": "clipship:1", "site": site, **image})


def test_the_same_job_gives_the_same_folder_without_caches_whatever_the_umask_is(tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        contexts.write_folder(contexts.context(job_with({})), tmp_path / "first")
    finally:
        os.umask(umask)
    contexts.write_folder(contexts.context(job_with({})), tmp_path / "second")
    assert (found := _files(tmp_path / "first")) == _files(tmp_path / "second")
    assert not [path for path in found if "__pycache__" in path.parts]


def test_all_that_the_dockerfile_copies_is_in_the_context() -> None:
    entries = contexts.context(job_with({}, mirrors={"apt": "http://mirror.example/debian"}))
    text = bytes(entries["Dockerfile"]).decode()
    lines = [line for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line]
    copied = [word for line in lines for word in line.split()[1:-1]]
    assert copied
    assert [name for name in copied if not any(entry.startswith(name) for entry in entries)] == []


def test_links_to_the_templates_stay_links_that_lead_somewhere(tmp_path: Path) -> None:
    contexts.write_folder(contexts.context(job_with({})), tmp_path / "context")
    link = tmp_path / "context/trainer/templates/docker"
    assert link.is_symlink()
    assert (link / "stacks.toml").is_file()


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


def test_without_git_a_checkout_gives_files_of_the_kinds_that_clipship_has(checkout: Path) -> None:
    more = source.source_files(checkout).keys() - source.source_files().keys()
    assert more == {"docker/token.txt", "trainer/scratch.py"}
    assert source.source_files().keys() <= source.source_files(checkout).keys()


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
    found = [
        path
        for top, _, names in os.walk(root, followlinks=True)
        for path in (Path(top, name) for name in names)
    ]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def test_certificates_and_mirrors_are_in_the_context_and_nowhere_else(tmp_path: Path) -> None:
    for name in ("a.pem", "b.pem"):
        (tmp_path / name).write_text(CERTIFICATE.replace("MII", name))
    mirrors = {
        "pip": "https://index.example/100%/simple",
        "apt": "http://mirror.example/debian",
        "apt_security": "http://mirror.example/debian-security",
    }
    job = job_with({"certificates": ("a.pem", "b.pem")}, mirrors=mirrors)
    entries = contexts.context(resolve_paths(job, tmp_path))
    assert bytes(entries["site/certificates.pem"]).count(b"BEGIN CERTIFICATE") == 2
    assert entries["site/apt-mirror"] == b"http://mirror.example/debian\n"
    assert entries["site/apt-security-mirror"] == b"http://mirror.example/debian-security\n"
    assert (
        entries["site/pip.conf"]
        == b"[global]\ncert = /site/ca.pem\nindex-url = https://index.example/100%%/simple\n"
    )


def test_passwords_are_in_no_context(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://me:hush@index.example/simple\n")
    job = resolve_paths(job_with({"pip_conf": "pip.conf"}), tmp_path)
    contexts.write_folder(contexts.context(job), tmp_path / "context")
    assert not [path for path, (_, content) in _files(tmp_path / "context").items() if b"hush" in content]


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


def _files(root: Path) -> dict[Path, tuple[int, bytes]]:
    """Mode of each file and folder, content of each file, target of each link."""
    return {
        path.relative_to(root): (
            path.lstat().st_mode,
            bytes(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b"",
        )
        for path in root.rglob("*")
    }


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
    done = subprocess.run(
        command,
        env={**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none.sock"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "Docker" in done.stderr


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("tar: write error: No space left on device", "disk is full"),
        ("ERROR: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", "image.site.certificates"),
        ("E: Unable to locate package numactll", "image.apt_packages"),
        ("cc1plus: fatal error: Killed signal terminated program cc1plus", "too little memory"),
        ("self-test: FAILED: nccl is 2.29.7, but the stack has 2.30.7", "nccl is 2.29.7"),
        (
            "base: its torch 2.5.0 is built without CUDA",
            "the base cannot be used: its torch 2.5.0 is built without CUDA",
        ),
        ("#12 3.456 the base has an MPI of its own: image.mpi", "the base has an MPI of its own: image.mpi"),
        (
            'Get "http://127.0.0.1:5013/v2/": dial tcp 127.0.0.1:5013: connect: connection refused',
            "image.base",
        ),
        ("tls: failed to verify certificate: x509: certificate signed by unknown authority", "certs.d"),
        ("ERROR: ResolutionImpossible: for help visit https://pip.pypa.io", "image.pip_packages"),
        (
            "WARNING: Retrying after NewConnectionError\nERROR: No matching distribution found for torch",
            "has no network",
        ),
        (
            "WARNING: Retrying after NewConnectionError\nStep 4/9 : RUN x\nself-test: FAILED: nccl is 2.29.7",
            "nccl is 2.29.7",
        ),
        (
            "#7 9.1 NewConnectionError\n#8 [horovod 2/9] RUN x\n#8 1.2 nvcc fatal: unsupported GNU version",
            "g++ is too new",
        ),
        (
            'Head "https://registry-1.docker.io/v2/x": dial tcp: lookup registry-1.docker.io: no such host',
            "image.base",
        ),
        (
            (
                "#10 [a 1/2] RUN x\n#10 CANCELED\n------\n > [wheels 5/6] RUN y:\n"
                "0.512 base: its torch 2.5 is old"
            ),
            "its torch 2.5 is old",
        ),
        ("connect: Connection refused\nself-test: FAILED: mpi", "differs from its stack: mpi"),
        ("E: Failed to fetch http://deb.example/x.deb  404  Not Found [IP: 1.2.3.4 80]", "try again later"),
        (
            "E: The repository 'http://deb.example/debian bookworm Release' does not have a Release file.",
            "not an archive of the base's",
        ),
        ("Err:4 https://deb.example bookworm InRelease\n  401  Unauthorized", "image.site.apt_auth"),
        (
            "ERROR: 401 Error, Credentials not correct for https://index.example/simple/torch/",
            "image.site.pip_conf",
        ),
        (
            "ERROR: Cannot find command 'git' - do you have 'git' installed and in your PATH?",
            'apt_packages = ["git"]',
        ),
        ("E: Version '9.9' for 'numactl' was not found", "image.apt_packages"),
        ("pip._vendor.urllib3.exceptions.ReadTimeoutError: Read timed out.", "has no network"),
        (
            (
                "Dockerfile:99\n 98 | RUN echo 'nvidia-nccl-cu12<0'\n 99 | RUN apt-get install numactll\n"
                "E: Unable to locate package numactll"
            ),
            "image.apt_packages",
        ),
        (
            "The user requested (constraint) nvidia-nccl-cu12<0\nERROR: ResolutionImpossible",
            "a second Horovod or NCCL",
        ),
        (
            "ERROR: Attestation is not supported for the docker driver.\nSwitch to a different driver",
            "containerd-snapshotter",
        ),
        ("Err:1 http://deb.example Temporary failure resolving 'deb.example'", "has no network"),
        ('unable to prepare context: path "context" not found', "set it to one in your home"),
    ],
)
def test_a_failed_build_names_the_likely_cause(output: str, cause: str) -> None:
    assert cause in (likely_cause(f"Step 3/9\n{output}\n") or "")


@pytest.mark.parametrize(
    "output",
    ["something else went wrong", "Step 9/30 : RUN echo 'the base has an MPI of its own: image.mpi'"],
)
def test_an_unknown_failure_gets_no_made_up_cause(output: str) -> None:
    assert likely_cause(output) is None


def test_security_updates_of_a_site_need_its_mirror() -> None:
    with pytest.raises(InputError, match="apt_security needs apt"):
        job_from_table(
            {"name": "x", "image": {"mirrors": {"apt_security": "http://mirror.example/s"}}}, "the job"
        )
