"""Mirrors of a build: presets by distribution and processor, names at a mirror of Docker Hub."""

from typing import Any

import pytest

from tests.support.command_line import render
from tests.unit.test_image_dockerfile import image_job
from trainer.config.loader import own_keys
from trainer.image.context import context

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
