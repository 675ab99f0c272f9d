"""Plugins of NCCL: their table, how they get into an image, and what the ranks get with them."""

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Said, problems, render
from tests.support.jobs import tiny_job
from tests.support.kubernetes_jobs import FABRIC_KEYS, kubernetes_job
from tests.support.range_server import serving
from trainer.config.image_plugins import PLUGINS
from trainer.config.loader import own_keys
from trainer.errors import InputError
from trainer.image.context import context
from trainer.sysinfo.template_folder import FOLDER

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
    archive = PLUGINS["aws-ofi-nccl"].archive
    assert archive is not None
    with pytest.raises(InputError, match=rf"has no {archive.name}, which comes from https://efa-installer"):
        context(tiny_job(image=image))
    (tmp_path / archive.name).write_bytes(b"x")
    job = tiny_job(image=image)
    assert context(job)[f"site/sources/{archive.name}"] == (tmp_path / archive.name).resolve()
    text = render("dockerfile", own_keys(job)).out
    assert "COPY site/ /site/" in text
    assert str(tmp_path) not in text


def fetch(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(FOLDER / "docker" / "fetch.py"), *arguments]
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
    script = FOLDER / "docker" / "plugins" / "nccl-rdma-sharp.sh"
    environment = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": f"/none:{tmp_path}"}
    without = subprocess.run(["sh", str(script)], capture_output=True, text=True, env=environment)
    assert without.returncode == 1
    assert "it has no nccl-rdma-sharp plugin" in without.stdout
    (tmp_path / "libnccl-net.so").touch()
    found = subprocess.run(["sh", str(script)], capture_output=True, text=True, env=environment)
    assert (found.returncode, found.stdout) == (0, f"nccl-rdma-sharp: {tmp_path}/libnccl-net.so\n")
