"""Mirrors of a build: presets by distribution and processor, names at a mirror of Docker Hub."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import clipship, render
from tests.unit.test_image_dockerfile import image_job
from trainer.config.loader import own_keys
from trainer.image.context import context


@pytest.mark.parametrize(
    ("image", "apt", "security"),
    [
        ({}, "debian", "debian-security"),
        ({"base": "ubuntu:24.04"}, "ubuntu", "ubuntu"),
        (
            {"base": "ubuntu:24.04", "platform": "linux/arm64", "stack": {"archs": ("9.0",)}},
            "ubuntu-ports",
            "ubuntu-ports",
        ),
    ],
)
def test_a_preset_has_the_archives_of_the_base(image: dict[str, Any], apt: str, security: str) -> None:
    job = image_job(mirrors={"preset": "ustc"}, **image)
    entries = context(job)
    assert entries["site/apt-mirror"] == f"http://mirrors.ustc.edu.cn/{apt}\n".encode()
    assert entries["site/apt-security-mirror"] == f"http://mirrors.ustc.edu.cn/{security}\n".encode()
    assert b"index-url = https://mirrors.ustc.edu.cn/pypi/simple\n" in bytes(entries["site/pip.conf"])


def found(**image: Any) -> dict[str, str]:
    """What the build's context says of mirrors, by the names of its files."""
    entries = context(image_job(**image))
    return {
        name.removeprefix("site/"): entry.decode()
        for name, entry in entries.items()
        if name.startswith("site/") and isinstance(entry, bytes)
    }


def test_own_mirrors_and_a_pip_conf_with_passwords_come_before_those_of_the_preset(tmp_path: Path) -> None:
    own = {"pip": "https://index.example/simple", "apt": "http://apt.example/debian"}
    its = found(mirrors={"preset": "tuna", **own})
    assert f"index-url = {own['pip']}\n" in its["pip.conf"]
    assert its["apt-mirror"] == f"{own['apt']}\n"
    assert its["apt-security-mirror"] == "http://mirrors.tuna.tsinghua.edu.cn/debian-security\n"
    security = "http://apt.example/security"
    assert (
        found(mirrors={"preset": "tuna", **own, "apt_security": security})["apt-security-mirror"]
        == f"{security}\n"
    )
    (tmp_path / "pip.conf").touch()
    its = found(mirrors={"preset": "aliyun"}, site={"pip_conf": str(tmp_path / "pip.conf")})
    assert "aliyun" not in its.get("pip.conf", "")
    assert its["apt-mirror"] == "http://mirrors.aliyun.com/debian\n"


def test_every_preset_has_an_address_without_certificates_which_a_slim_base_lacks() -> None:
    choices = json.loads(clipship("explain", "image.mirrors.preset", "--json").out)
    presets = re.findall(
        r'"(\w+)"', json.dumps(choices.get("enum") or choices.get("anyOf") or choices.get("oneOf"))
    )
    assert {"tuna", "aliyun", "ustc"} <= set(presets)
    for name in set(presets) - {"enum", "type", "string", "null"}:
        assert found(mirrors={"preset": name})["apt-mirror"].startswith("http://")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("debian:12-slim", "library/debian:12-slim"),
        ("docker.io/debian:12", "library/debian:12"),
        ("docker.io/library/debian:12", "library/debian:12"),
        ("index.docker.io/library/debian", "library/debian"),
        ("nvidia/cuda:13.0.1-base-ubuntu24.04", "nvidia/cuda:13.0.1-base-ubuntu24.04"),
        (f"debian@sha256:{64 * 'a'}", f"library/debian@sha256:{64 * 'a'}"),
        ("nvcr.io/nvidia/pytorch:25.09-py3", None),
        ("index.example/debian:12", None),
        ("localhost/debian:12", None),
        ("ours:5000/debian:12", None),
    ],
)
def test_only_images_of_docker_hub_are_mirrored(name: str, path: str | None) -> None:
    system = "ubuntu-24.04" if "ubuntu" in name else "debian-12"
    job = image_job(base=name, os=system, mirrors={"registry": "m.example:5000/hub"})
    text = render("dockerfile", own_keys(job)).out
    assert ("m.example:5000/hub/" in text) is (path is not None)
    assert path is None or f"m.example:5000/hub/{path}" in text
