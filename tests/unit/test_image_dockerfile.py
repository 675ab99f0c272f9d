"""Output of `clipship render dockerfile` and `apptainer`, as whole texts.

No value of a job file becomes anything but data.
"""

import json
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from tests.support.linters import hadolint
from trainer.config import Job

TAG = "registry.example/team/clipship:1"


def image_job(stack: dict[str, Any] | None = None, **image: Any) -> Job:
    return tiny_job(stack=stack or {}, image={"tag": TAG, **image})


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
