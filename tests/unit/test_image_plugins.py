"""Plugins of NCCL: their table, how they get into an image, and what the ranks get with them."""

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from tests.support.kubernetes_jobs import FABRIC_KEYS, kubernetes_job
from tests.support.pages import ROOT
from tests.support.range_server import serving
from trainer.cli.main import main
from trainer.config import fabrics, image_plugins
from trainer.config.stack_table import table
from trainer.errors import InputError
from trainer.image.context import context
from trainer.image.dockerfile import dockerfile
from trainer.launch import fabric

OWN_BASE = {"base": "registry.example/nvidia/pytorch:1", "os": "ubuntu-24.04"}


def job_on(fabric: str, **sections: Any) -> Any:
    given = {"resources": {"fabric": fabric}, "kubernetes": FABRIC_KEYS[fabric]}
    return kubernetes_job(**{**given, **sections})


def test_the_key_takes_the_rows_of_the_table() -> None:
    rows = tuple(image_plugins.PLUGINS)
    assert [tiny_job(image={"plugins": (row,)}).image.plugins for row in rows] == [(row,) for row in rows]


@pytest.mark.parametrize("row", image_plugins.PLUGINS.values(), ids=lambda row: row.name)
def test_each_row_says_why_and_can_be_built(row: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert row.fabric in fabrics.FABRICS
    assert (row.origin == "node") == (not row.script)
    assert (row.origin == "archive") == (row.archive is not None)
    assert not row.script or (ROOT / "docker" / "plugins" / row.script).is_file()
    assert set(row.systems) <= set(table().systems)
    assert main(["fabrics", "explain", row.fabric]) == 0
    said = capsys.readouterr().out
    assert f"plugin      {row.title} = " in said
    assert row.why in said
    assert row.archive is None or row.archive.sha256 in said


def test_a_plugin_brings_its_variables_on_its_network_only() -> None:
    image = {"plugins": ("aws-ofi-nccl",)}
    assert fabric.cluster_environment(job_on("efa", image=image), 8)["NCCL_NET_PLUGIN"] == "ofi"
    assert "NCCL_NET_PLUGIN" not in fabric.cluster_environment(job_on("efa"), 8)
    other = job_on("ethernet", image=image)
    assert "NCCL_NET_PLUGIN" not in fabric.cluster_environment(other, 8)
    assert any('aws-ofi-nccl is for resources.fabric = "efa"' in text for text in fabric.plugin_advice(other))


def test_sharp_takes_the_place_of_nccls_own_transport() -> None:
    with_it = fabric.cluster_environment(job_on("ib", image={"plugins": ("nccl-rdma-sharp",), **OWN_BASE}), 8)
    assert with_it["NCCL_COLLNET_ENABLE"] == "1"
    assert "NCCL_NET" not in with_it
    assert fabric.cluster_environment(job_on("ib"), 8)["NCCL_NET"] == "IB"


def test_a_network_whose_plugin_the_image_lacks_is_named() -> None:
    (said,) = fabric.plugin_advice(job_on("efa"))
    assert said.endswith('needs aws-ofi-nccl in the image: image.plugins = ["aws-ofi-nccl"] installs it')
    assert not list(fabric.plugin_advice(job_on("efa", image={"plugins": ("aws-ofi-nccl",)})))
    assert not list(fabric.plugin_advice(job_on("efa", image=OWN_BASE))), "such a base may have it"
    assert not list(fabric.plugin_advice(job_on("ib"))), "SHARP is not needed"


def test_an_nccl_that_the_plugin_does_not_know_is_refused() -> None:
    stack = {"torch": "base", "nccl": "2.16.5"}
    job = tiny_job(stack=stack, image={"tag": "clipship:1", "plugins": ("aws-ofi-nccl",), **OWN_BASE})
    with pytest.raises(
        InputError, match=r"aws-ofi-nccl needs NCCL 2\.17\.1 or newer, but the image has 2\.16"
    ):
        dockerfile(job)


def test_archives_of_the_site_go_along_and_a_missing_one_is_named(tmp_path: Path) -> None:
    image = {"tag": "clipship:1", "plugins": ("aws-ofi-nccl",), "site": {"sources": str(tmp_path)}}
    archive = image_plugins.PLUGINS["aws-ofi-nccl"].archive
    assert archive is not None
    with pytest.raises(InputError, match=rf"has no {archive.name}, which comes from https://efa-installer"):
        context(tiny_job(image=image))
    (tmp_path / archive.name).write_bytes(b"x")
    job = tiny_job(image=image)
    assert context(job)[f"site/sources/{archive.name}"] == (tmp_path / archive.name).resolve()
    assert "COPY site/ /site/" in dockerfile(job)
    assert str(tmp_path) not in dockerfile(job)


def fetch(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "docker" / "fetch.py"), *arguments]
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
    script = ROOT / "docker" / "plugins" / "nccl-rdma-sharp.sh"
    environment = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": f"/none:{tmp_path}"}
    without = subprocess.run(["sh", str(script)], capture_output=True, text=True, env=environment)
    assert without.returncode == 1
    assert "it has no nccl-rdma-sharp plugin" in without.stdout
    (tmp_path / "libnccl-net.so").touch()
    found = subprocess.run(["sh", str(script)], capture_output=True, text=True, env=environment)
    assert (found.returncode, found.stdout) == (0, f"nccl-rdma-sharp: {tmp_path}/libnccl-net.so\n")
