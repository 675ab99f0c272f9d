"""Mirrors of a build: presets by distribution and processor, names at a mirror of Docker Hub."""

from typing import Any

import pytest

from tests.unit.test_image_dockerfile import image_job
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
