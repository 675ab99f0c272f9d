"""`docker/layer.sh`, which gathers what a build's step made, in a folder that stands for the stage."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

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
