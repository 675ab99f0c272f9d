"""Output of `clipship render dockerfile` and `apptainer`, as whole texts.

No value of a job file becomes anything but data.
"""

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_line import Said, problems, render
from tests.support.jobs import tiny_job
from tests.support.kubernetes_jobs import FABRIC_KEYS, kubernetes_job
from tests.support.linters import hadolint
from tests.support.range_server import serving
from trainer.config import Job
from trainer.config.loader import own_keys
from trainer.errors import InputError
from trainer.image.context import context
from trainer.image.dockerfile import dockerfile

TAG = "registry.example/team/clipship:1"
HOSTILE = [
    "$(touch /tmp/x)", "`id`", '"; RUN id #', "a\\", "it's", "# comment", "$HOME ${HOME}", "<<EOF", "ä 日本",
    "--mount=x", "\\n", "",
]  # fmt: skip

one_line = st.text(
    st.characters(codec="utf-8", exclude_characters="\x00\r\n"), max_size=40
) | st.sampled_from(HOSTILE)


def image_job(stack: dict[str, Any] | None = None, **image: Any) -> Job:
    return tiny_job(stack=stack or {}, image={"tag": TAG, **image})


def instructions(text: str) -> list[dict[str, Any]]:
    """As an independent parser reads the file."""
    parser = DockerfileParser(fileobj=io.BytesIO(), env_replace=False)
    parser.content = text
    return [part for part in parser.structure if part["instruction"] != "COMMENT"]


def variables(text: str) -> dict[str, str]:
    """The ENV of the last stage, unquoted as Docker does it (moby, builder/dockerfile/shell/lex.go)."""
    parts = instructions(text)
    last = max(number for number, part in enumerate(parts) if part["instruction"] == "FROM")
    pairs = (part["value"].partition("=") for part in parts[last:] if part["instruction"] == "ENV")
    return {name: unquoted(value) for name, _, value in pairs}


def unquoted(value: str) -> str:
    """Fails, by what it returns, if a quote or a dollar ends the value or is replaced."""
    inner = re.fullmatch(r'"((?:[^"$\\]|\\.)*)"', value)
    return re.sub(r'\\(["$\\])', r"\1", inner[1]) if inner else value


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "everything": {
        "stack": {"archs": ("8.0", "9.0", "10.0"), "driver": 580},
        "base": "debian:12-slim@sha256:" + "0" * 64,
        "mpi": "pypi",
        "compiler": True,
        "apt_packages": ("numactl",),
        "pip_packages": ("einops==0.8.1",),
        "env": {"NOTE": 'a "quoted" $value', "LD_LIBRARY_PATH": "/opt/mine/lib"},
        "run": ("ldconfig", "printf '%s\\n' \"$HOME\" >/opt/note"),
        "labels": {"org.opencontainers.image.vendor": 'Team "A"'},
        "mirrors": {"apt": "http://mirror.example/debian"},
        "site": {"certificates": ("ca.pem",), "apt_auth": "auth.conf"},
    },
    "passwords": {
        "builder": "buildkit",
        "compression": "estargz",
        "mirrors": {
            "apt": "http://mirror.example/debian",
            "apt_security": "http://mirror.example/debian-security",
        },
        "site": {"certificates": ("ca.pem",), "pip_conf": "pip.conf"},
    },
    "index": {
        "stack": {"cuda": "13.0", "nccl": "2.30.7", "open_clip": "3.3.0"},
        "mirrors": {"pip": "https://index.example/simple"},
        "site": {"wheelhouse": "/wheels"},
    },
    "mirrored": {"mirrors": {"preset": "tuna", "registry": "mirror.example/hub"}},
    "arm64": {"stack": {"archs": ("9.0", "10.0")}, "platform": "linux/arm64"},
    "plugins": {"plugins": ("aws-ofi-nccl",), "apt_packages": ("numactl",), "site": {"sources": "/sources"}},
    "newer-nccl": {"stack": {"torch": "2.13.0", "nccl": "2.32.3"}, "site": {"pip_conf": "pip.conf"}},
    "older": {"stack": {"torch": "2.6.0"}, "base": "debian:13", "run": ("ldconfig",)},
    "own-torch": {
        "stack": {"torch": "base", "nccl": "2.27.7"},
        "base": "nvcr.io/nvidia/pytorch:25.09-py3",
        "os": "ubuntu-24.04",
        "mpi": "base",
    },
    "own-sharp": {
        "stack": {"torch": "base"},
        "base": "nvcr.io/nvidia/pytorch:25.09-py3",
        "os": "ubuntu-24.04",
        "mpi": "base",
        "cuda_home": "/opt/cuda-13.0",
        "plugins": ("nccl-rdma-sharp",),
    },
    "own-toolkit": {
        "stack": {"torch": "2.8.0"},
        "base": "registry.example/hpc/cuda:12.8",
        "os": "ubuntu-24.04",
        "toolkit": "base",
        "mpi": "base",
    },
}
"""Keys of [image], and with them those of [stack]."""


@pytest.mark.parametrize("name", CASES)
def test_dockerfile_golden(golden: Callable[[str, str], None], name: str) -> None:
    golden(f"dockerfile-{name}.txt", dockerfile(image_job(**CASES[name])))


def test_apptainer_golden(golden: Callable[[str, str], None]) -> None:
    golden("apptainer.txt", render("apptainer", own_keys(image_job())).out)


PLAIN_WORDS = instructions(
    dockerfile(image_job(env={"MINE": "x"}, labels={"team": "x"}, run=("first", "x"), pip_packages=("x",)))
)
a_word = one_line.filter(lambda text: text.strip() == text != "" and not text.startswith("-"))


@given(value=one_line, word=a_word)
def test_any_value_reaches_the_image_as_it_is(value: str, word: str) -> None:
    """Of a name, a variable, a label, a requirement and an own command: each stays where it stands."""
    job = image_job(env={"MINE": value}, labels={"team": value}, run=("first", word), pip_packages=(word,))
    text = dockerfile(job.model_copy(update={"name": word}))
    parts = instructions(text)
    assert [part["instruction"] for part in parts] == [part["instruction"] for part in PLAIN_WORDS]
    assert variables(text)["MINE"] == value
    labels = dict(part["value"].split("=", 1) for part in parts if part["instruction"] == "LABEL")
    assert unquoted(labels["team"]) == value
    assert unquoted(labels["org.opencontainers.image.title"]) == f"Clipship for {word}"
    steps = [part["value"] for part in parts if part["instruction"] == "RUN"]
    [own] = [step for step in steps if "layer.sh" in step and "--more" in step]
    assert shlex.split(own) == ["sh", "/docker/layer.sh", "--count", "--more", "sh", "-c", word]
    requirement = next(step for step in steps if "constraints.txt" in step and "sh -c" in step)
    assert shlex.split(shlex.split(requirement)[-1])[-1] == word


@pytest.mark.parametrize("name", CASES)
def test_hadolint_accepts_each_golden(name: str) -> None:
    assert hadolint(dockerfile(image_job(**CASES[name]))) == ""


def test_hadolint_refuses_what_no_golden_may_have() -> None:
    said = hadolint("FROM debian:latest\nRUN cd / && sudo ls\n")
    assert {"DL3007", "DL3004"} <= set(said.split())


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"run": ("a\nb",)}, "image.run"),
        ({"run": ("curl -H 'Authorization: Bearer ghp_0123456789abcdefghijklmnopqrstuvwxyz'",)}, "history"),
        ({"labels": {"Team A": "x"}}, "not a label"),
        ({"labels": {"org.clipship.torch": "1"}}, "says what the image was built from"),
        ({"labels": {"api-token": "abcdef0123456789"}}, "looks like a secret"),
        ({"apt_packages": ("$(id)",)}, "not a system package"),
        ({"pip_packages": ("--index-url=x",)}, "not a requirement"),
        ({"env": {"A": "two\nlines"}}, "pattern"),
        ({"env": {"PATH": "/x"}}, "it follows from the stack"),
        ({"base": "Debian 12"}, "not an image name"),
        ({"base": "debian:12\nRUN id"}, "not an image name"),
        *(
            ({"base": name}, "not an image name")
            for name in ("--platform/x", "a//b", "a..b:1", "a/-/b", "a_-b")
        ),
        *(({"tag": name}, "not an image name") for name in ("a b", "--x:1", "127.0.0.1:99999/x", 300 * "a")),
        ({"cuda_home": "/usr/local/cuda\nRUN id #"}, "cuda_home"),
        ({"pip_packages": ("git+https://me:hush@host.example/x.git",)}, "pip_conf"),
        ({"mirrors": {"pip": "https://me:secret@index.example/simple"}}, "pip_conf"),
        ({"mirrors": {"pip": "index.example"}}, "not an address"),
        ({"mirrors": {"registry": "https://a.example"}}, "not a registry"),
        ({"mirrors": {"registry": "a.example/$(id)"}}, "not a registry"),
        ({"builder": "classic", "site": {"pip_conf": "x"}}, "classic builder"),
        ({"site": {"pip_conf": "x"}, "mirrors": {"pip": "https://index.example/simple"}}, "excludes"),
    ],
    ids=json.dumps,
)
def test_what_cannot_be_said_in_a_dockerfile_is_refused(image: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image_job(**image)


# Plugins of NCCL: their table, how they get into an image, and what the ranks get with them.

OWN_BASE = {"base": "registry.example/nvidia/pytorch:1", "os": "ubuntu-24.04"}


def on(fabric: str, **sections: Any) -> Said:
    """The manifest of a job on such a network, and what is warned of."""
    given = {"resources": {"fabric": fabric}, "kubernetes": FABRIC_KEYS[fabric]}
    return render("kubernetes", own_keys(kubernetes_job(**{**given, **sections})))


def test_a_plugin_brings_its_variables_on_its_network_only() -> None:
    image = {"plugins": ["aws-ofi-nccl"]}
    with_it, without, other = on("efa", image=image), on("efa"), on("ethernet", image=image)
    assert '{name: "NCCL_NET_PLUGIN", value: "ofi"}' in with_it.out
    assert "NCCL_NET_PLUGIN" not in without.out + other.out
    assert 'aws-ofi-nccl is for resources.fabric = "efa"' in other.err
    advice = 'needs aws-ofi-nccl in the image: image.plugins = ["aws-ofi-nccl"] installs it\n'
    assert advice in without.err
    assert advice not in with_it.err
    assert advice not in on("efa", image=OWN_BASE).err, "such a base may have it"
    assert "in the image:" not in on("ib").err, "SHARP is not needed"


def test_an_nccl_that_the_plugin_does_not_know_is_refused() -> None:
    stack = {"torch": "base", "nccl": "2.16.5"}
    image = {"tag": "clipship:1", "plugins": ["aws-ofi-nccl"], **OWN_BASE}
    assert "aws-ofi-nccl needs NCCL 2.17.1 or newer, but the image has 2.16" in problems(
        stack=stack, image=image
    )


def test_archives_of_the_site_go_along_and_a_missing_one_is_named(tmp_path: Path) -> None:
    image = {"tag": "clipship:1", "plugins": ("aws-ofi-nccl",), "site": {"sources": str(tmp_path)}}
    with pytest.raises(InputError, match=r"has no \S+, which comes from https://efa-installer") as missing:
        context(tiny_job(image=image))
    archive = tmp_path / str(missing.value).partition("has no ")[2].partition(",")[0]
    archive.write_bytes(b"x")
    job = tiny_job(image=image)
    assert context(job)[f"site/sources/{archive.name}"] == archive.resolve()
    text = render("dockerfile", own_keys(job)).out
    assert "COPY site/ /site/" in text
    assert str(tmp_path) not in text


DOCKER = Path(__file__).parents[2] / "docker"


def fetch(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(DOCKER / "fetch.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_download_is_held_to_its_hash(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.tar.gz").write_bytes(b"content")
    right = sha256(b"content").hexdigest()
    with serving(tmp_path / "served") as (address, _):
        done = fetch(f"{address}/a.tar.gz", right, str(tmp_path / "a"))
        assert (done.returncode, (tmp_path / "a").read_bytes()) == (0, b"content"), done.stderr
        done = fetch(f"{address}/a.tar.gz", "0" * 64, str(tmp_path / "b"))
        assert done.returncode == 1
        assert f"a.tar.gz: its sha256 is {right}, but 000" in done.stderr
        done = fetch(f"{address}/none.tar.gz", right, str(tmp_path / "c"))
        assert done.returncode == 1
        assert "name it in image.site.sources" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_base_without_sharp_fails_the_build_in_words(tmp_path: Path) -> None:
    script = DOCKER / "plugins" / "nccl-rdma-sharp.sh"
    environment = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": f"/none:{tmp_path}"}
    without = subprocess.run(["sh", str(script)], capture_output=True, text=True, env=environment)
    assert without.returncode == 1
    assert "it has no nccl-rdma-sharp plugin" in without.stdout
    (tmp_path / "libnccl-net.so").touch()
    found = subprocess.run(["sh", str(script)], capture_output=True, text=True, env=environment)
    assert (found.returncode, found.stdout) == (0, f"nccl-rdma-sharp: {tmp_path}/libnccl-net.so\n")


# Mirrors of a build: presets by distribution and processor, names at a mirror of Docker Hub.

HOPPER: dict[str, Any] = {"stack": {"archs": ("9.0",)}}


@pytest.mark.parametrize(
    ("image", "apt", "security"),
    [
        ({}, "debian", "debian-security"),
        ({"base": "ubuntu:24.04"}, "ubuntu", "ubuntu"),
        ({"base": "ubuntu:24.04", "platform": "linux/arm64", **HOPPER}, "ubuntu-ports", "ubuntu-ports"),
    ],
)
def test_a_preset_has_the_archives_of_the_base(image: dict[str, Any], apt: str, security: str) -> None:
    job = image_job(mirrors={"preset": "ustc"}, **image)
    entries = context(job)
    assert entries["site/apt-mirror"] == f"http://mirrors.ustc.edu.cn/{apt}\n".encode()
    assert entries["site/apt-security-mirror"] == f"http://mirrors.ustc.edu.cn/{security}\n".encode()
    assert b"index-url = https://mirrors.ustc.edu.cn/pypi/simple\n" in bytes(entries["site/pip.conf"])


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("debian:12-slim", "library/debian:12-slim"),
        ("docker.io/library/debian:12", "library/debian:12"),
        ("nvidia/cuda:13.0.1-base-ubuntu24.04", "nvidia/cuda:13.0.1-base-ubuntu24.04"),
        (f"debian@sha256:{64 * 'a'}", f"library/debian@sha256:{64 * 'a'}"),
        ("index.example/debian:12", None),
        ("ours:5000/debian:12", None),
    ],
)
def test_only_images_of_docker_hub_are_mirrored(name: str, path: str | None) -> None:
    system = "ubuntu-24.04" if "ubuntu" in name else "debian-12"
    job = image_job(base=name, os=system, mirrors={"registry": "m.example:5000/hub"})
    text = render("dockerfile", own_keys(job)).out
    assert ("m.example:5000/hub/" in text) is (path is not None)
    assert path is None or f"m.example:5000/hub/{path}" in text
