"""Long tests of images: Open MPI 5, BuildKit and its secrets, a whole older stack, a compiler, a build
without an index, Apptainer.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.image import daemon, storage
from tests.cluster.image.daemon import docker
from tests.cluster.image.images import (
    ROOT,
    SSHD_OF_USER,
    Built,
    build,
    build_stage,
    changed_copy,
    clipship,
    in_image,
    over_ssh,
    write_job,
)
from trainer.config.stack_table import table

pytestmark = [pytest.mark.docker, pytest.mark.full, pytest.mark.timeout(7200)]


@pytest.fixture(autouse=True)
def _leave_no_images(default_image: Built) -> Iterator[None]:
    """Each of these builds takes tens of gigabytes, most of it in stages without a name."""
    before = daemon.images()
    yield
    daemon.remove(daemon.images() - before)


def _packages(tag: str) -> str:
    done = clipship("image", "sbom", tag, code=0)
    return done.stdout


def test_open_mpi_5_of_pypi_is_in_the_image_and_shares_the_wheels_layers(
    default_image: Built, bookworm: str, tmp_path: Path
) -> None:
    tag = "clipship-test:openmpi5"
    build(write_job(tmp_path, tag, bookworm, "debian-12", mpi="pypi"), tag)
    assert "5.0" in in_image(tag, "mpirun", "--version").stdout
    layers = [
        docker("inspect", "--format={{json .RootFS.Layers}}", image) for image in (default_image.tag, tag)
    ]
    first, second = (re.findall(r"sha256:\w+", text) for text in layers)
    assert first[:3] == second[:3]  # the base, the system, the wheels


LARGEST_CHANGE_MB = {"code": 8, "a package of the job": 16}
"""Bytes that a node pulls after a change, of an image of which it has the rest."""


def test_a_change_is_pulled_as_megabytes(
    default_image: Built,
    bookworm: str,
    docker_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The layers that the registry then has of the image, and had not before, are what a node pulls."""
    (tmp_path / "changed").mkdir()
    changed_copy(tmp_path / "changed")
    changes: tuple[tuple[str, Path, dict[str, Any]], ...] = (
        ("before", ROOT, {}),
        ("code", tmp_path / "changed", {}),
        ("a package of the job", ROOT, {"pip_packages": ["einops==0.8.1"]}),
    )
    with storage.registry(docker_folder) as address:
        layers: dict[str, dict[str, int]] = {}
        for what, root, image in changes:
            tag = f"{address}/team/{what.replace(' ', '-')}:1"
            job = write_job(tmp_path, tag, bookworm, "debian-12", **image)
            build(job, tag, root=root)
            clipship("image", "push", str(job), root=root, code=0)
            _, pushed = storage.manifest(address, tag.removeprefix(f"{address}/").removesuffix(":1"), "1")
            layers[what] = {layer["digest"]: layer["size"] for layer in pushed["layers"]}
            layers[what][pushed["config"]["digest"]] = pushed["config"]["size"]
    whole = sum(layers["before"].values())
    for what, most_mb in LARGEST_CHANGE_MB.items():
        pulled = sum(size for digest, size in layers[what].items() if digest not in layers["before"])
        with capsys.disabled():
            print(f"\n{what}: {pulled / 1e6:.2f} MB are pulled of {whole / 1e6:.0f} MB")
        assert 0 < pulled <= most_mb * 1e6


def test_two_builds_without_a_cache_give_the_same_packages(
    default_image: Built, bookworm: str, tmp_path: Path
) -> None:
    """BuildKit has a cache of its own, and here a secret as well: a build from nothing by the
    other builder.
    """
    conf = tmp_path / "pip.conf"
    conf.write_text("[global]\ntimeout = 97\n")
    tag = "clipship-test:buildkit"
    site = {"pip_conf": str(conf)}
    build(write_job(tmp_path, tag, bookworm, "debian-12", site=site), tag)
    assert _packages(tag) == _packages(default_image.tag)
    told = docker("history", "--no-trunc", tag) + docker("inspect", tag)
    assert "timeout" not in told
    assert in_image(tag, "find", "/", "-xdev", "-name", "pip_conf", options=("--user=0",)).stdout == ""


@pytest.mark.parametrize("name", ["podman", "buildah"])
def test_a_builder_without_a_daemon_gives_the_same_packages(
    default_image: Built, bookworm: str, docker_folder: Path, tmp_path: Path, name: str
) -> None:
    inside = docker_folder / name
    inside.mkdir()
    with storage.storage(inside, None) as made:
        with subprocess.Popen(["docker", "save", bookworm], stdout=subprocess.PIPE) as saved:
            made.must("podman", "load", stdin=saved.stdout)
        tag = f"localhost/clipship-test:{name}"
        job = write_job(tmp_path, tag, bookworm, "debian-12", builder=name)
        done = clipship("image", "build", str(job), "--any-disk", root=ROOT, **made.variables, code=0)
        for words in (("verify", tag), ("sbom", tag)):
            done = clipship("image", *words, "--builder", name, root=ROOT, **made.variables, code=0)
    assert done.stdout == _packages(default_image.tag)


def test_an_older_stack_is_built_on_debian_13_with_its_own_cuda(docker_folder: Path, tmp_path: Path) -> None:
    tag = "clipship-test:older"
    base = daemon.base("trixie", docker_folder)
    build(write_job(tmp_path, tag, base, "debian-13", stack={"torch": "2.6.0"}), tag)
    done = clipship("image", "verify", tag, code=0)
    assert "stack 2.6.0:" in done.stderr
    assert table().row("2.6.0").nccl in done.stdout


def test_a_newer_nccl_than_torchs_own_is_the_only_one_in_the_image(bookworm: str, tmp_path: Path) -> None:
    """Horovod is compiled against it, and the build's proof finds no other in a rank's process."""
    known = table()
    newest = known.newer_nccls(known.row(known.default))[-1]
    tag = "clipship-test:newer-nccl"
    build(write_job(tmp_path, tag, bookworm, "debian-12", stack={"nccl": newest}), tag)
    done = clipship("image", "verify", tag, code=0)
    facts = json.loads(done.stdout)
    assert facts["nccl"] == newest
    assert "NCCL" in facts["horovod"]
    found = in_image(tag, "find", "/", "-xdev", "-name", "libnccl.so*", options=("--user=0",)).stdout
    assert len(found.split()) == 1, found


# The default's own build stage, rearranged as NVIDIA's images are: torch, CUDA and NCCL in the system's
# folders, a toolkit, a user 1000.
_OWN_TORCH = r"""FROM {stage}
RUN set -e; to=/usr/local/lib/python3.11/dist-packages; cd /opt/clipship/lib/python3.11/site-packages; \
    mkdir -p $to; \
    mv torch* functorch* triton* nvidia* cuda* sympy* mpmath* networkx* $to; \
    cp -r jinja2* markupsafe* filelock* fsspec* typing_extensions* numpy* pillow* PIL $to; \
    mv $to/nvidia/nccl/lib/libnccl.so.2 /usr/lib/x86_64-linux-gnu/; \
    mv $to/nvidia/nccl/include/nccl.h /usr/include/; \
    rm -r $to/nvidia/nccl $to/nvidia_nccl*; ldconfig; \
    ln -s $to/nvidia/cu13 /usr/local/cuda; userdel --remove clipship; \
    useradd --uid 1000 --user-group --create-home ubuntu; \
    rm -r /opt/clipship /docker /layer /workspace /build
ENV PIP_CONSTRAINT=/etc/constraint.txt
RUN echo numpy==1.26.4 >/etc/constraint.txt
"""


def test_a_base_with_a_torch_of_its_own_is_checked_and_gets_no_second_one(
    default_image: Built, bookworm: str, tmp_path: Path
) -> None:
    stage, base, tag = "clipship-test:stage", "clipship-test-own:torch", "clipship-test:own-torch"
    build_stage("horovod", default_image.job, stage)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/Dockerfile").write_text(_OWN_TORCH.format(stage=stage))
    docker("build", f"--tag={base}", str(tmp_path / "own"))
    row = table().row(table().default)
    try:
        wrong = clipship(
            "image", "build", str(_on_own_torch(tmp_path, tag, base, mpi="debian")), "--any-disk"
        )
        assert wrong.returncode == 1
        assert 'image.mpi = "base" takes it' in wrong.stderr
        build(_on_own_torch(tmp_path, tag, base, mpi="base", stack={"nccl": row.nccl}), tag)
        done = clipship("image", "verify", tag, code=0)
        assert "stack base:" in done.stderr
        assert '"nccl_library": "/usr/lib/x86_64-linux-gnu/libnccl.so.2"' in done.stdout
        assert in_image(tag, "sh", "-c", "ls -d /opt/clipship/lib/python3*/site-packages/torch").stdout == ""
        assert over_ssh(tag, "command -v python mpirun", SSHD_OF_USER).split() == [
            "/opt/clipship/bin/python",
            "/usr/bin/mpirun",
        ]
    finally:  # the stage is the cache of other builds, too
        subprocess.run(["docker", "rmi", "--force", tag, base], check=False)


def _on_own_torch(
    folder: Path, tag: str, base: str, *, stack: dict[str, str] | None = None, **image: str
) -> Path:
    return write_job(folder, tag, base, "debian-12", stack={"torch": "base", **(stack or {})}, **image)


def test_a_compiler_stays_where_the_job_asks_for_it_and_any_user_compiles(
    bookworm: str, tmp_path: Path
) -> None:
    tag = "clipship-test:compiler"
    build(
        write_job(tmp_path, tag, bookworm, "debian-12", compiler=True), tag
    )  # its proof has trained a compiled step
    verified = clipship("image", "verify", tag, code=0)
    assert '"compiled": ' in verified.stdout
    proof = ("python", "-P", "-m", "trainer.image.selftest", "--compiler")
    done = in_image(tag, *proof, options=("--user=4242:4242", "--env=HOME=/nowhere"))
    assert done.returncode == 0, done.stderr[-3000:]
    left = in_image(
        tag,
        "find",
        "/tmp",
        "/var/tmp",
        "/home",
        "-name",
        "*inductor*",
        "-o",
        "-name",
        "*triton*",
        options=("--user=0",),
    )
    assert left.stdout == ""


def test_a_wheelhouse_replaces_the_index(bookworm: str, tmp_path: Path) -> None:
    house, tag = tmp_path / "wheels", "clipship-test:offline"
    job = write_job(tmp_path, tag, bookworm, "debian-12")
    clipship("image", "wheelhouse", str(job), str(house), code=0)
    offline = write_job(tmp_path, tag, bookworm, "debian-12", site={"wheelhouse": str(house)})
    wheel = next(house.glob("einops-*.whl"), None) or next(house.glob("ftfy-*.whl"))
    wheel.rename(tmp_path / wheel.name)
    lacking = clipship("image", "build", str(offline), "--any-disk", code=1)
    assert "the index or the wheelhouse lacks a package" in lacking.stderr
    (tmp_path / wheel.name).rename(wheel)
    build(offline, tag)


def test_apptainer_builds_the_image_and_runs_it(
    default_image: Built, docker_folder: Path, tmp_path: Path
) -> None:
    """In a container of Debian 13: older releases carry no apptainer."""
    definition = clipship("render", "apptainer", str(default_image.job), code=0)
    (tmp_path / "clipship.def").write_text(definition.stdout)
    script = """set -e
        sed -i 's/trixie/sid/' /etc/apt/sources.list; apt-get -o Acquire::Check-Valid-Until=false update -qq
        apt-get install -qq --no-install-recommends apptainer >/dev/null
        apptainer build --sandbox /var/tmp/box /work/clipship.def
        apptainer exec /var/tmp/box clipship --version"""
    # What apptainer needs, rather than --privileged: root on this machine may lack a capability, and may not
    # give it then.
    capabilities = (
        "--cap-add=SYS_ADMIN",
        "--cap-add=DAC_READ_SEARCH",
        "--security-opt=seccomp=unconfined",
        "--security-opt=apparmor=unconfined",
    )
    places = ("--volume=/var/run/docker.sock:/var/run/docker.sock", f"--volume={tmp_path}:/work")
    options = (*capabilities, "--env=APPTAINER_NO_PRIVS=1", *places)
    done = in_image(
        daemon.base("trixie", docker_folder), "bash", "-c", script, options=options, network="bridge"
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "clipship" in done.stdout
