"""Context of an image build, the same bytes each time, and what is said of a build that fails."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.config import Job
from trainer.config.loader import dump_job
from trainer.errors import InputError
from trainer.image import build, selftest, source, verify
from trainer.image import context as contexts
from trainer.image.builder import Stored, likely_cause

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
    job = job_with({"pip_conf": str(tmp_path / "pip.conf")})
    contexts.write_folder(contexts.context(job), tmp_path / "context")
    assert not [name for name, content in _contents(tmp_path / "context").items() if b"hush" in content]


def test_a_wheelhouse_goes_along_with_what_its_links_lead_to_and_no_index_is_asked(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/a-1-py3-none-any.whl").write_bytes(b"wheel")
    (tmp_path / "kept.whl").write_bytes(b"linked")
    link = tmp_path / "wheels/b-1-py3-none-any.whl"
    link.symlink_to(tmp_path / "kept.whl")
    (tmp_path / "ours.pem").write_text(CERTIFICATE)
    job = job_with({"wheelhouse": str(tmp_path / "wheels"), "certificates": (str(tmp_path / "ours.pem"),)})
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("not a certificate")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=message):
        contexts.context(job_with(site))


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


# What runs within an image's build: its self-test, and the script that gathers what a step made.

STACK = {"torch": "2.14.1", "cuda": "13.0", "nccl": "2.30.7"}
FOUND = {"torch": "2.9.0a0", "cuda": "13.0", "nccl": "2.27.7", "archs": ["8.0", "9.0"]}


def checked(monkeypatch: pytest.MonkeyPatch, **expected: str) -> dict[str, Any]:
    monkeypatch.setattr(selftest, "_output", lambda command: json.dumps(FOUND))
    return selftest._checked_libraries(expected)


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        ({"torch_min": "2.6.0"}, None),
        ({"torch_min": "2.9.0"}, None),
        ({"gpus": "8.0,8.6,9.0", "archs": "8.0,9.0", "cuda": "13.0", "nccl": "2.27.7"}, None),
        ({"torch": "2.9.0"}, "torch is 2.9.0a0, but the stack has 2.9.0"),
        ({"torch_min": "2.10.0"}, "the trainer needs 2.10.0 or newer"),
        ({"gpus": "8.0,10.0"}, "no code for 10.0"),
        ({"archs": "8.6"}, "no code for 8.6"),
        ({"nccl": "2.30.7"}, "nccl is 2.27.7, but the stack has 2.30.7"),
    ],
)
def test_libraries_with_other_versions_than_promised_are_named(
    monkeypatch: pytest.MonkeyPatch, expected: dict[str, str], said: str | None
) -> None:
    if said is None:
        assert checked(monkeypatch, **expected) == FOUND
        return
    with pytest.raises(selftest.SelfTestFailed, match=said):
        checked(monkeypatch, **expected)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"torch": "2.14.1", "nccl": "2.30.7"}, "--torch 2.14.1 --nccl 2.30.7"),
        (STACK, "--torch 2.14.1 --cuda 13.0 --nccl 2.30.7 --archs 7.5,8.0,8.6,9.0,10.0,12.0"),
        (
            {**STACK, "platform": "linux/arm64"},
            "--torch 2.14.1 --cuda 13.0 --nccl 2.30.7 --archs 8.0,9.0,10.0,11.0,12.0",
        ),
        ({"torch": "base", "cuda": "13.0"}, "--cuda 13.0"),
        ({"compiler": "g++"}, "--compiler"),
        ({}, ""),
    ],
)
def test_verify_asks_for_what_the_labels_promise(labels: dict[str, str], words: str) -> None:
    given = {f"org.clipship.{name}": value for name, value in labels.items()}
    assert verify._expectations(Stored("sha256:1", (), {"Labels": given}, 1)) == words.split()


# `docker/layer.sh` in a folder that stands for the stage


TOOLS = ("sh", "find", "xargs", "cp", "rm", "mkdir", "sleep", "tr", "wc")
LAYER = Path(__file__).parents[2] / "docker" / "layer.sh"


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A folder with the programs of a minimal Debian that the script needs."""
    if subprocess.run(["unshare", "--user", "--map-root-user", "chroot", "/", "true"]).returncode:
        pytest.skip("this system lets no user change the root folder")
    for tool in TOOLS:
        path = shutil.which(tool)
        assert path is not None
        libraries = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        for file in (path, *re.findall(r"(/\S+) \(0x", libraries)):
            target = tmp_path / file.removeprefix("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    for folder in ("tmp", "root/.cache", "var/log", "var/cache", "var/lib/apt", "proc", "opt"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(LAYER, tmp_path)
    return tmp_path


def run(stage: Path, *words: str) -> str:
    """Runs a command of the shell with the folder as its root; returns what it says."""
    inside = ["unshare", "--user", "--map-root-user", "chroot", str(stage), "sh", "-c", '"$@"', "sh"]
    path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    return subprocess.run([*inside, *words], env=path, capture_output=True, text=True, check=True).stdout


def gathered(stage: Path) -> set[str]:
    layer = stage / "layer"
    return {str(path.relative_to(layer)) for path in layer.rglob("*") if not path.is_dir()}


def test_files_of_the_jobs_own_commands_are_gathered_and_those_left_out_are_counted(stage: Path) -> None:
    (stage / "opt" / "old").touch()
    weights = "mkdir -p /root/.cache/hub /root/.cache/pip /var/cache/apt; >/root/.cache/hub/weights"
    made = f"{weights}; >/opt/new; >/root/.cache/pip/wheel; >/var/log/a; >'/var/log/b c'; >/var/cache/apt/x"
    told = run(stage, "sh", "/layer.sh", "--count", "sh", "-c", made)
    assert gathered(stage) == {"opt/new", "root/.cache/hub/weights"}
    counts = dict(re.findall(r"below (\S+), which stay out of the image: (\d+)", told))
    assert counts == {"/root/.cache/pip": "1", "/var/log": "2", "/var/cache": "1"}
    assert run(stage, "sh", "/layer.sh", "--count", "--more", "sh", "-c", ">/opt/more") == ""
    assert gathered(stage) == {"opt/new", "opt/more", "root/.cache/hub/weights"}
    assert run(stage, "sh", "/layer.sh", "sh", "-c", ">/opt/other; >/tmp/x") == ""
    assert gathered(stage) == {"opt/other"}


# docker/build-horovod.sh: what it refuses before it builds, and what the library that came out names.

SCRIPT = Path(__file__).parents[2] / "docker" / "build-horovod.sh"


def build_library(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script for this test's own environment."""
    command = [SCRIPT, "--python", sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --wheel-dir and --cache"),
        (["--wheel"], "option --wheel is unknown or has no value"),
        (["--cache", "b", "--ops", "rocm"], "--ops is rocm; it can be auto, cpu or nccl"),
        (["--cache", "b", "--jobs", "0"], "--jobs is 0"),
        (["--cache", "b", "--python", "/no/python"], "there is no Python at /no/python"),
        (["--cache", "b", "--ops", "nccl", "--cuda-home", "/no/cuda"], "--ops nccl, but"),
    ],
)
def test_build_refuses_bad_options(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = build_library(*(str(tmp_path / "b") if argument == "b" else argument for argument in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_build_refuses_an_environment_without_torch(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    done = build_library("--cache", tmp_path / "cache", "--python", tmp_path / "bare" / "bin" / "python")
    assert done.returncode == 2
    assert "torch is not installed in this environment" in done.stderr


def test_the_system_s_nccl_that_torch_loads_is_found_with_its_header(tmp_path: Path) -> None:
    """As NVIDIA's images have it: no wheel of NCCL, and ldd names it by way of /lib, which is a link."""
    torch, tools = tmp_path / "site/torch", tmp_path / "tools"
    libraries = tmp_path / "usr/lib/x86_64-linux-gnu"
    for folder in (torch / "lib", tmp_path / "site/torch-2.14.1.dist-info", tools / "bin", libraries):
        folder.mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text("cuda: str | None = '13.0'\n")
    (tmp_path / "site/torch-2.14.1.dist-info/METADATA").write_text("Name: torch\nVersion: 2.14.1\n")
    (libraries / "libnccl.so.2").touch()
    (tmp_path / "lib").symlink_to("usr/lib")
    loaded = f"\tlibnccl.so.2 => {tmp_path}/lib/x86_64-linux-gnu/libnccl.so.2 (0x7f)"
    for name, says in (("ldd", loaded), ("nvcc", "release 13.0, V13.0.88")):
        (tools / "bin" / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tools / "bin" / name).chmod(0o755)
    found = {"PYTHONPATH": str(tmp_path / "site"), "PATH": f"{tools}/bin:{os.environ['PATH']}"}
    words = ["--cache", f"{tmp_path}/cache", "--ops", "nccl", "--cuda-home", str(tools)]
    done = build_library(*words, **found)
    assert f"there is no nccl.h in {tmp_path}/usr/include" in done.stderr
    (tmp_path / "usr/include").mkdir()
    (tmp_path / "usr/include/nccl.h").touch()
    done = build_library(*words, CXX="no-such-compiler", **found)
    assert done.returncode == 3, "what is looked at after NCCL has a code of its own"
    assert "there is no C++ compiler (no-such-compiler)" in done.stderr


@pytest.mark.horovod
def test_build_refuses_another_sdist_and_leaves_nothing(tmp_path: Path) -> None:
    sdist = tmp_path / "horovod-0.28.1.tar.gz"
    sdist.write_bytes(b"something else")
    done = build_library("--cache", tmp_path / "cache", "--ops", "cpu", "--sdist", sdist)
    assert done.returncode == 2
    assert "has another sha256" in done.stderr
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.horovod
def test_library_names_no_folder_of_the_environment_it_was_built_in() -> None:
    library = next(file for file in metadata.files("horovod") or [] if file.match("mpi_lib_v2*.so"))
    dynamic = subprocess.run(
        ["readelf", "-d", library.locate()], capture_output=True, text=True, check=True
    ).stdout
    folders = dynamic.partition("runpath: [")[2].partition("]")[0].split(":")
    assert "$ORIGIN/../../torch/lib" in folders
    assert not [folder for folder in folders if folder.startswith(sys.prefix)]
