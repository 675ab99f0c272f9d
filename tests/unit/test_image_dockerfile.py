"""Output of `clipship render dockerfile` and `apptainer`, as whole texts.

No value of a job file becomes anything but data.
"""

import io
import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser
from hypothesis import given
from hypothesis import strategies as st

from tests.support.jobs import tiny_job
from tests.support.linters import hadolint
from trainer.config import Job
from trainer.errors import InputError
from trainer.image.apptainer import definition
from trainer.image.dockerfile import dockerfile

TAG = "registry.example/team/clipship:1"
HOSTILE = [
    "$(touch /tmp/x)",
    "`id`",
    '"; RUN id #',
    "a\\",
    "it's",
    "# comment",
    "$HOME ${HOME}",
    "<<EOF",
    "ä 日本",
    "--mount=x",
    "\\n",
    "",
]

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
    if not value.startswith('"'):
        return value
    result, rest = "", value[1:-1]
    while rest:
        if rest[0] == "\\" and rest[1:2] in ('"', "$", "\\"):
            result, rest = result + rest[1], rest[2:]
        else:
            assert rest[0] not in '"$', f"{rest[0]} ends the value or is replaced"
            result, rest = result + rest[0], rest[1:]
    return result


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
    golden("apptainer.txt", definition(image_job()))


PLAIN = instructions(dockerfile(image_job()))


@given(name=st.text(min_size=1, max_size=40) | st.sampled_from([text for text in HOSTILE if text]))
def test_any_name_that_a_job_may_have_leaves_the_dockerfile_as_it_is(name: str) -> None:
    try:
        job = tiny_job(name=name, image={"tag": TAG})
    except ValueError:
        return
    other = instructions(dockerfile(job))
    assert [part["instruction"] for part in other] == [part["instruction"] for part in PLAIN]
    title = next(part["value"] for part in other if "image.title" in part["value"])
    assert unquoted(title.partition("=")[2]) == f"Clipship for {name}"


PLAIN_WORDS = instructions(
    dockerfile(
        image_job(env={"MINE": "x"}, labels={"team": "x"}, run=("first", "x"), pip_packages=("x",)),
    )
)
a_word = one_line.filter(lambda text: text.strip() == text != "" and not text.startswith("-"))


@given(value=one_line, word=a_word)
def test_any_value_reaches_the_image_as_it_is(value: str, word: str) -> None:
    """Of a variable, a label, a requirement and a command of one's own: each stays where it stands."""
    job = image_job(env={"MINE": value}, labels={"team": value}, run=("first", word), pip_packages=(word,))
    text = dockerfile(job)
    parts = instructions(text)
    assert [part["instruction"] for part in parts] == [part["instruction"] for part in PLAIN_WORDS]
    assert variables(text)["MINE"] == value
    [label] = [part for part in parts if part["value"].startswith("team=")]
    assert unquoted(label["value"].partition("=")[2]) == value
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
        ({"run": (" ",)}, "an empty command"),
        ({"run": ("curl -H 'Authorization: Bearer ghp_0123456789abcdefghijklmnopqrstuvwxyz'",)}, "history"),
        ({"labels": {"Team A": "x"}}, "not a label"),
        ({"labels": {"org.clipship.torch": "1"}}, "says what the image was built from"),
        ({"labels": {"api-token": "abcdef0123456789"}}, "looks like a secret"),
        ({"labels": {"team": "a\nb"}}, "image.labels"),
        ({"apt_packages": ("a b",)}, "not a system package"),
        ({"apt_packages": ("-o=x",)}, "not a system package"),
        ({"apt_packages": ("$(id)",)}, "not a system package"),
        ({"pip_packages": ("--index-url=x",)}, "not a requirement"),
        ({"pip_packages": ("a\nb",)}, "pattern"),
        ({"env": {"A": "two\nlines"}}, "pattern"),
        ({"env": {"A B": "x"}}, "pattern"),
        ({"env": {"PATH": "/x"}}, "it follows from the stack"),
        ({"base": "Debian 12"}, "not an image name"),
        ({"base": "debian:12\nRUN id"}, "not an image name"),
        *(
            ({"base": name}, "not an image name")
            for name in ("--platform/x", "a//b", "a..b:1", "a/-/b", "a_-b", "MyTeam/clip:1")
        ),
        *(
            ({"tag": name}, "not an image name")
            for name in ("a b", "--help/x:1", "127.0.0.1:99999/x", 300 * "a")
        ),
        ({"cuda_home": "/usr/local/cuda\nRUN id #"}, "cuda_home"),
        ({"cuda_home": "cuda"}, "cuda_home"),
        ({"pip_packages": ("git+https://me:hush@host.example/x.git",)}, "pip_conf"),
        ({"pip_packages": ("x @ https://token@host.example/x.whl",)}, "pip_conf"),
        ({"mirrors": {"pip": "https://me:pa/ss@index.example/simple"}}, "pip_conf"),
        ({"mirrors": {"pip": "https://me:secret@index.example/simple"}}, "pip_conf"),
        ({"mirrors": {"pip": "index.example"}}, "not an address"),
        *(
            ({"mirrors": {"registry": name}}, "not a registry")
            for name in ("mirror", "https://a.example", "a.example/x:1", "a.example/$(id)")
        ),
        ({"mirrors": {"registry": "a.example/\nRUN id"}}, "pattern"),
        ({"site": 0}, "valid dictionary"),
        ({"builder": "classic", "site": {"pip_conf": "x"}}, "classic builder"),
        ({"site": {"pip_conf": "x"}, "mirrors": {"pip": "https://index.example/simple"}}, "excludes"),
    ],
    ids=json.dumps,
)
def test_what_cannot_be_said_in_a_dockerfile_is_refused(image: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image_job(**image)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        (
            "tag",
            (
                *("localhost/x", "ours:5000/x/y_z/a__b/c--d:T_1", "[::1]:5000/x", "127.0.0.1:65535/a.b"),
                *(128 * "x" + ":1", "x@sha256:" + 64 * "0"),
            ),
        ),
        (  # addresses without a password
            "pip_packages",
            (
                *(("git+https://host.example/x.git@v1",), ("git+ssh://git@host.example:22/x",)),
                ("x @ https://host.example:8443/x@1.whl",),
            ),
        ),
        ("mirrors", ({"pip": "https://index.example/_packaging/feed@Release/pypi/simple/"},)),
    ],
)
def test_what_docker_and_pip_take_is_taken(key: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert image_job(**{key: value})


def test_apptainer_needs_the_image_s_name() -> None:
    with pytest.raises(InputError, match=r"image\.tag: missing"):
        definition(tiny_job())
