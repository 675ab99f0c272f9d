"""BuildKit, where Docker keeps images as containerd does: the deeds of its row, and each form of layers."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.image.builder_deeds import ADDED, REVISION, deeds
from tests.cluster.image.daemon import dockerd
from tests.cluster.image.images import ROOT, clipship, write_job
from tests.cluster.image.storage import manifest, registry, tiny_base
from trainer.config.loader import load_job
from trainer.errors import ClusterError
from trainer.image.builder import BUILDERS
from trainer.sysinfo.addresses import free_port

pytestmark = [pytest.mark.newer_docker, pytest.mark.timeout(600)]

BASE = "clipship-test-tiny"


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with daemon(tmp_path_factory.mktemp("dockerd"), containerd=True) as made:
        yield made


@contextmanager
def daemon(folder: Path, *, containerd: bool) -> Iterator[dict[str, str]]:
    """Yields what the docker command is told of a daemon of its own; its bridge leads nowhere."""
    bridge = f"clipship-test{containerd:d}"
    (folder / "daemon.json").write_text(json.dumps({"features": {"containerd-snapshotter": containerd}}))
    host = f"unix://{folder}/docker.sock"
    places = {"config-file": "daemon.json", "data-root": "data", "exec-root": "exec", "pidfile": "pid"}
    options = [f"--{name}={folder / place}" for name, place in places.items()]
    options += [f"--host={host}", f"--bridge={bridge}", "--iptables=false", "--ip-masq=false"]
    own = {"DOCKER_HOST": host, "DOCKER_CONFIG": str(folder / "docker")}
    subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], check=True)
    try:
        address = f"198.18.{254 + containerd:d}.1/24"
        subprocess.run(["ip", "address", "add", address, "dev", bridge], check=True)
        with dockerd(folder / "log", *options, **own):
            base = ["docker", "import", "-", BASE]
            subprocess.run(base, env=os.environ | own, input=tiny_base(), check=True)
            yield own
    finally:
        subprocess.run(["ip", "link", "delete", bridge], check=True)


@pytest.mark.parametrize("form", ["gzip", "zstd", "estargz"])
def test_buildkit_pushes_layers_in_the_form_that_is_asked(
    variables: dict[str, str], tmp_path: Path, form: str
) -> None:
    secret = tmp_path / "pip.conf"
    secret.write_text("a password")
    with registry(tmp_path) as address:
        tag = f"{address}/team/built:1"
        site = {"pip_conf": str(secret)}
        job = write_job(tmp_path, tag, BASE, "debian-12", builder="buildkit", site=site, compression=form)
        told = deeds(job, variables)
        digest, written = manifest(address, "team/built", "1")
    assert told["labels"]["org.opencontainers.image.revision"] == REVISION
    assert told["code"] == 3
    assert {ADDED, "opt/id"} <= {*told["names"]}
    assert "read" not in told["names"]
    assert told["pushed"] == digest
    kinds = {layer["mediaType"].rpartition("+")[2] for layer in written["layers"]}
    assert kinds == {"zstd" if form == "zstd" else "gzip"}
    listed = {any("stargz" in key for key in layer.get("annotations", {})) for layer in written["layers"]}
    assert listed == {form == "estargz"}  # a list of files, by which a node takes some of a layer


def test_what_buildkit_attaches_is_pushed_with_the_image(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with registry(tmp_path) as address:
        tag = f"{address}/team/attested:1"
        job = load_job(write_job(tmp_path, tag, BASE, "debian-12", builder="buildkit"))
        builder = BUILDERS["buildkit"]
        builder.build(job, {"Dockerfile": f"FROM {BASE}\n".encode()}, ["--provenance=mode=max"])
        pushed = builder.push(job, tag)
        words = ["docker", "buildx", "imagetools", "inspect", f"{address}/team/attested@{pushed}"]
        told = subprocess.run(
            [*words, "--format={{json .Provenance}}"], capture_output=True, text=True, check=True
        )
    assert "buildConfig" in told.stdout, "BuildKit attaches the rest unasked, too"


def test_docker_that_keeps_images_in_its_own_way_says_what_needs_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registry(tmp_path) as address, daemon(tmp_path, containerd=False) as told:
        tag = f"{address}/team/built:1"
        job = write_job(tmp_path, tag, BASE, "debian-12", builder="buildkit", compression="zstd")
        subprocess.run(["docker", "tag", BASE, tag], env=os.environ | told, check=True)
        done = clipship("image", "push", str(job), code=1, root=ROOT, **told)
        nobody = f"127.0.0.1:{free_port('127.0.0.1')}/team/built:1"
        subprocess.run(["docker", "tag", BASE, nobody], env=os.environ | told, check=True)
        other = ("--set", f"image.tag={nobody}")
        alone = clipship("image", "push", str(job), *other, code=1, root=ROOT, **told)
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ClusterError, match="likely cause: what --sbom and --provenance attach needs"):
            BUILDERS["buildkit"].build(
                load_job(job), {"Dockerfile": f"FROM {BASE}\n".encode()}, ["--provenance=true"]
            )
    assert "its layers are not all zstd: for that Docker must keep images as containerd does" in done.stderr
    assert f"{nobody} was not pushed (`docker login HOST` stores" in alone.stderr
