"""Mirrors of a build: presets by distribution and processor, names at a mirror of Docker Hub."""

from typing import Any, get_args

import pytest

from tests.unit.test_image_dockerfile import image_job
from trainer.config.mirrors import Mirrors, path_at_hub, presets
from trainer.image.base import mirrored_base, mirrors_of
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


def test_own_mirrors_come_before_those_of_the_preset() -> None:
    own = {"pip": "https://index.example/simple", "apt": "http://apt.example/debian"}
    found = mirrors_of(image_job(mirrors={"preset": "tuna", **own}))
    security = "http://mirrors.tuna.tsinghua.edu.cn/debian-security"
    assert (found.pip, found.apt, found.apt_security) == (own["pip"], own["apt"], security)
    own["apt_security"] = "http://apt.example/security"
    assert mirrors_of(image_job(mirrors={"preset": "tuna", **own})).apt_security == own["apt_security"]


def test_a_pip_conf_with_passwords_comes_before_the_index_of_the_preset() -> None:
    found = mirrors_of(image_job(mirrors={"preset": "aliyun"}, site={"pip_conf": "pip.conf"}))
    assert (found.pip, found.apt) == (None, "http://mirrors.aliyun.com/debian")


def test_every_preset_is_in_the_table_and_each_address_is_one() -> None:
    choices = get_args(get_args(Mirrors.model_fields["preset"].annotation)[0])
    assert set(choices) == set(presets())
    for row in presets().values():
        assert Mirrors.model_validate(row).apt == row["apt"]
        assert row["apt"].startswith("http://"), "a slim base has no certificates for apt yet"


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
    assert path_at_hub(name) == path
    mirrored = mirrored_base(image_job(base=name, os="debian-12", mirrors={"registry": "m.example:5000/hub"}))
    assert mirrored == (path and f"m.example:5000/hub/{path}")
