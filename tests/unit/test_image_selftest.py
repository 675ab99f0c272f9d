"""What runs within an image's build: its self-test, and the script that gathers what a step made."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trainer.image import selftest, verify
from trainer.image.builder import Stored

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
