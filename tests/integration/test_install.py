"""The wheel of this checkout in an environment of its own: what a login node needs works without torch."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.install import build_wheel, empty_environment, run_pip
from trainer.config.schedulers import SCHEDULERS
from trainer.presets.files import preset_names

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def clipship(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in an environment that has the wheel and what it depends on, in the pinned versions."""
    folder = tmp_path_factory.mktemp("install")
    wheel = build_wheel(folder)
    pins = dict(
        re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "docker/requirements.txt").read_text(), re.MULTILINE)
    )
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    python = empty_environment(folder / "environment")
    run_pip(python, "install", "--quiet", "--constraint", str(constraints), str(wheel))
    return python.with_name("clipship")


def run(clipship: Path, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([clipship, *arguments], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("module", ["torch", "numpy", "PIL", "tools"])
def test_login_node_has_neither_torch_nor_numpy_nor_our_tools(
    clipship: Path, tmp_path: Path, module: str
) -> None:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is not None)"
    assert subprocess.run([clipship.with_name("python"), "-I", "-c", code], cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("preset", preset_names())
def test_login_node_writes_checks_and_renders_each_preset(
    clipship: Path, tmp_path: Path, preset: str
) -> None:
    assert run(clipship, tmp_path, "init", "--preset", preset, "job.toml").returncode == 0
    checked = run(clipship, tmp_path, "check", "job.toml", "--no-data")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "backend" in checked.stdout
    table = tomllib.loads((tmp_path / "job.toml").read_text())
    named = [name for name in SCHEDULERS if name in table]
    for name in named or ["slurm"]:
        rendered = run(clipship, tmp_path, "render", name, "job.toml")
        assert rendered.returncode == 0
        silent = named or "resources" in table
        assert bool(rendered.stderr) == (not silent), "it says what it asks for where the job does not"
        assert len(rendered.stdout.splitlines()) > 50
    dockerfile = run(clipship, tmp_path, "render", "dockerfile", "job.toml")
    assert (dockerfile.returncode, dockerfile.stdout[:5]) == (0, "# Gen"), dockerfile.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["run", "job.toml"],
        ["doctor", "job.toml"],
        ["train", "job.toml"],
        ["index", "shard.tar"],
        ["data", "stats", "shard.tar"],
        ["pack", "table.csv", "shards"],
    ],
    ids=lambda command: command[0],
)
def test_command_that_needs_more_says_what_to_install(
    clipship: Path, tmp_path: Path, command: list[str]
) -> None:
    run(clipship, tmp_path, "init", "--preset", "laptop", "job.toml")
    ended = run(clipship, tmp_path, *command)
    assert ended.returncode == 2
    assert re.fullmatch(
        r"(clipship: reading job\.toml\n)?"
        r"clipship: the Python package \w+ is not installed: .*pip install 'clipship\[train\]' brings it\n",
        ended.stderr,
    )


def test_each_extra_of_the_table_brings_its_modules() -> None:
    from trainer.sysinfo.extras import EXTRAS

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought_as = {"open_clip": "open-clip-torch", "PIL": "pillow", "pynvml": "nvidia-ml-py"}
    brought_as |= {"google.protobuf": "protobuf", "mlflow": "mlflow-skinny", "faiss": "faiss-cpu"}
    brought_as |= {"ftfy": "open-clip-torch", "huggingface_hub": "open-clip-torch"}  # through others
    brought_as |= {"tokenizers": "transformers", "urllib3": "kubernetes"}
    for extra, modules in EXTRAS.items():
        names = {canonicalize_name(Requirement(line).name) for line in project[extra]}
        assert names == {canonicalize_name(brought_as.get(module, module)) for module in modules}
