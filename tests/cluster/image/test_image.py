"""The default stack's image, built for real and used: what is in it, who can run it, how it trains, what a
change costs.
"""

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.image import storage
from tests.cluster.image.daemon import docker
from tests.cluster.image.images import (
    ROOT,
    SSHD_OF_ROOT,
    SSHD_OF_USER,
    Built,
    Sshd,
    build,
    build_stage,
    changed_copy,
    clipship,
    in_image,
    over_ssh,
    write_job,
)
from trainer.config.stack_table import table
from trainer.demo.__main__ import prepare as prepare_demo

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3600)]

# What the wheels themselves record: all their files, none that pip compiled.
_WHEEL_SIZES = """
import importlib.metadata as metadata
from packaging.requirements import Requirement
todo = [(name, frozenset()) for name in ("torch", "torchvision", "pyarrow")]
seen, sizes = {}, {}
while todo:
    name, extras = todo.pop()
    if name in seen and extras <= seen[name]:
        continue
    seen[name] = seen.get(name, frozenset()) | extras
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue
    sizes[name] = sum(file.size or 0 for file in found.files or ())
    for need in map(Requirement, found.requires or ()):
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            todo.append((need.name, frozenset(need.extras)))
print(sum(sizes.values()))
"""
LARGEST = 1.05
"""The image against these wheels: pyarrow, which reads tables of pictures, is the largest after torch's."""


def test_verify_names_the_row_of_the_table(default_image: Built) -> None:
    done = clipship("image", "verify", default_image.tag, code=0)
    default = table().default
    assert f"stack {default}:" in done.stderr
    facts = json.loads(done.stdout)
    assert facts["stack"] == default
    assert facts["nccl"] == table().row(default).nccl
    assert {"PyTorch", "MPI", "Gloo", "NCCL"} <= set(facts["horovod"])


def test_no_compiler_cache_toolkit_or_site_is_in_the_image(default_image: Built) -> None:
    look = r"""
        for tool in cc gcc g++ c++ make cmake nvcc ptxas; do command -v $tool; done
        ls -d /site /docker /layer /clipship /build /etc/apt/apt.conf.d/99site /root/.cache \
            /home/clipship/.local /home/clipship/.cache /etc/ssh/ssh_host_* 2>/dev/null
        find /opt/clipship -name '*.a' -o -name nvcc
        find /var/lib/apt/lists /var/cache/apt -type f
        find /tmp -mindepth 1
        true"""
    found = in_image(default_image.tag, "sh", "-c", look, options=("--user=0",))
    assert found.stdout.strip() == ""


def test_neither_history_nor_labels_nor_variables_tell_of_the_site(default_image: Built) -> None:
    told = docker("history", "--no-trunc", default_image.tag) + docker("inspect", default_image.tag)
    assert "/site" not in told
    assert "PIP_" not in told
    assert "DEBIAN_FRONTEND" not in told


@pytest.mark.parametrize(
    "user",
    [pytest.param("0", marks=pytest.mark.full), pytest.param("1000", marks=pytest.mark.full), "4242:4242"],
)
def test_the_proof_holds_for_root_the_image_s_user_and_any_other(default_image: Built, user: str) -> None:
    done = in_image(
        default_image.tag,
        "python",
        "-P",
        "-m",
        "trainer.image.selftest",
        options=(f"--user={user}", "--env=HOME=/tmp"),
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("sshd", [SSHD_OF_ROOT, SSHD_OF_USER], ids=["root", "user"])
def test_sshd_lets_the_holder_of_the_job_s_key_in_and_finds_mpirun(default_image: Built, sshd: Sshd) -> None:
    found = over_ssh(default_image.tag, "command -v mpirun python clipship", sshd)
    assert found.split() == ["/usr/bin/mpirun", "/opt/clipship/bin/python", "/opt/clipship/bin/clipship"]


@pytest.mark.parametrize(
    ("backend", "launcher"), [("torch", "clipship"), ("horovod", "mpirun"), ("horovod", "clipship")]
)
def test_the_demo_learns_inside(default_image: Built, tmp_path: Path, backend: str, launcher: str) -> None:
    prepare_demo(tmp_path)
    tmp_path.chmod(0o777)
    settings = [
        f"comm.backend={backend}",
        f"comm.launcher={launcher}",
        "optim.epochs=6",
        "resources.cpus_per_gpu=1",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    command = ("clipship", "run", "/workspace/job.toml", "--nproc", "2", *words)
    # With no interface but loopback Horovod's gloo dies of a segmentation fault.
    done = in_image(
        default_image.tag, *command, options=(f"--volume={tmp_path}:/workspace",), network="bridge"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "runs/digits/result.json").read_text())["zero_shot_top1"] > 0.5
    ranks = json.loads((tmp_path / "runs/digits/environment.json").read_text())
    assert {(rank["nccl_mapped"], rank["image_nccl"]) for rank in ranks} == {
        (table().row(table().default).nccl,) * 2
    }


def test_a_run_with_another_nccl_than_its_image_was_proven_with_is_refused_at_its_start(
    default_image: Built, tmp_path: Path
) -> None:
    prepare_demo(tmp_path)
    tmp_path.chmod(0o777)
    (tmp_path / "stack.json").write_text(
        '{"nccl": "2.28.3"}'
    )  # as if a library had been mounted over it: the promise is another
    volumes = (
        f"--volume={tmp_path}:/workspace",
        f"--volume={tmp_path}/stack.json:/opt/clipship/stack.json:ro",
    )
    done = in_image(
        default_image.tag, "clipship", "run", "/workspace/job.toml", "--nproc", "2", options=volumes
    )
    assert done.returncode == 2
    assert f"nccl {table().row(table().default).nccl}, the image has 2.28.3: ranks 0, 1" in done.stderr


def test_the_list_of_packages_has_names_versions_and_licences(default_image: Built) -> None:
    done = clipship("image", "sbom", default_image.tag)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert rows == sorted(rows, key=lambda row: (row[0], row[1].lower(), row[2]))
    found = {(row[0], row[1]): row[2:] for row in rows}
    assert found["python", "torch"][0] == table().default
    assert found["system", "libstdc++6"][1].startswith(("GPL", "see")), (
        "its documentation is a link to that of another package"
    )
    assert "BSD" in found["system", "openssh-server"][1]
    assert "not stated" not in {row[3] for row in rows if row[0] == "system"}
    assert all(len(row) == 4 and all(row) for row in rows)


def test_a_change_in_the_trainer_builds_neither_wheels_nor_horovod_again(
    default_image: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed_copy(tmp_path)
    tag = "clipship-test:changed"
    job = tmp_path / "job.toml"
    job.write_text(default_image.job.read_text().replace(default_image.tag, tag))
    rebuilt = build(job, tag, root=tmp_path)
    steps = re.split(r"^Step ", rebuilt.output, flags=re.MULTILINE)
    ran = [step for step in steps if "Running in" in step]
    assert not [step for step in ran if "requirements" in step or "build-horovod" in step]
    assert [step for step in ran if "/tmp/clipship" in step]  # the change was built
    docker("rmi", tag)
    size, measured = _measured(default_image, rebuilt)
    with capsys.disabled():
        print(f"\n{measured}")
    assert size <= LARGEST


def test_what_the_jobs_own_commands_make_is_in_their_stage_s_layer(
    default_image: Built, bookworm: str, tmp_path: Path
) -> None:
    """Steps before theirs come from the cache; a later step changes a file that an earlier one made."""
    commands = (
        "mkdir /opt/own && echo first >/opt/own/list",
        "echo second >>/opt/own/list && touch '/opt/own/a name' && rm -f /opt/own/none",
        "printf %s 'a <<EOF $HOME' >/opt/own/text; echo changed >>/etc/hosts.allow",
    )
    job = write_job(tmp_path, default_image.tag, bookworm, "debian-12", run=commands)
    build_stage("own", job, "clipship-test:own")
    look = "cd /layer/opt/own && cat list && ls && cat text && echo && find /layer -type f | wc -l"
    found = in_image("clipship-test:own", "sh", "-c", look, options=("--user=0",))
    assert found.stdout.splitlines() == ["first", "second", "a name", "list", "text", "a <<EOF $HOME", "4"], (
        found.stderr
    )


def test_a_build_for_another_processor_ends_at_its_first_step(
    default_image: Built, bookworm: str, tmp_path: Path
) -> None:
    job = write_job(tmp_path, "clipship-test:arm64", bookworm, "debian-12", platform="linux/arm64")
    done = clipship("image", "build", str(job), "--any-disk", code=1)
    assert "image.platform is linux/arm64, but this build is for amd64" in done.stderr + done.stdout, (
        done.stderr[-3000:]
    )


def test_a_site_s_mirrors_replace_the_base_s_archives_security_too(bookworm: str, tmp_path: Path) -> None:
    for name in ("apt-mirror", "apt-security-mirror"):
        (tmp_path / name).write_text(f"http://{name}.example/debian\n")
    volumes = (f"--volume={tmp_path}:/site", f"--volume={ROOT}/docker/site.sh:/site.sh:ro")
    done = in_image(bookworm, "sh", "-c", "sh /site.sh && cat /etc/apt/sources.list", options=volumes)
    assert done.stdout.splitlines() == [
        "deb http://apt-mirror.example/debian bookworm main",
        "deb http://apt-mirror.example/debian bookworm-updates main",
        "deb http://apt-security-mirror.example/debian bookworm-security main",
    ]


@pytest.fixture(scope="module")
def registry(docker_folder: Path) -> Iterator[str]:
    """The address of a registry on loopback."""
    with storage.registry(docker_folder) as address:
        yield address


def test_an_image_goes_to_a_registry_and_comes_back_by_its_digest(
    bookworm: str, docker_folder: Path, registry: str
) -> None:
    tag = f"{registry}/team/base:1"
    docker("tag", bookworm, tag)
    job = write_job(docker_folder, tag, bookworm, "debian-12", name="push.toml")
    done = clipship("image", "push", str(job), code=0)
    assert re.fullmatch(rf"{re.escape(registry)}/team/base@sha256:[0-9a-f]{{64}}\n", done.stdout)
    docker("rmi", tag)
    docker("pull", done.stdout.strip())


def test_a_base_comes_from_the_mirror_of_docker_hub_and_its_digest_is_recorded(
    default_image: Built, bookworm: str, docker_folder: Path, registry: str
) -> None:
    """A base of no official name has the default image's first steps, which the builder has in its cache."""
    mirrored = f"{registry}/hub/team/debian:12-never-local"
    docker("tag", bookworm, mirrored)
    docker("push", mirrored)
    docker("rmi", mirrored)
    with urllib.request.urlopen(
        urllib.request.Request(
            f"http://{registry}/v2/hub/team/debian/manifests/12-never-local",
            headers={"Accept": "application/vnd.docker.distribution.manifest.v2+json"},
        )
    ) as answer:
        digest = answer.headers["Docker-Content-Digest"]
    tag, base = "clipship-test:mirrored", "team/debian:12-never-local"
    mirrors = {"registry": f"{registry}/hub"}
    job = write_job(docker_folder, tag, base, "debian-12", name="mirrored.toml", mirrors=mirrors)
    built = build(job, tag)
    told = json.loads(docker("inspect", tag))[0]
    labels = told["Config"]["Labels"]
    assert labels["org.opencontainers.image.base.name"] == base
    assert labels["org.opencontainers.image.base.digest"] == digest
    assert f"{mirrored}, {digest}" in built.output
    assert registry not in docker("history", "--no-trunc", tag) + json.dumps(told["Config"])
    docker("rmi", tag)
    absent = job.with_name("absent.toml")
    absent.write_text(job.read_text().replace(base, "team/debian:12-not-there"))
    done = clipship("image", "build", str(absent), "--any-disk", code=1)
    assert " cannot be asked for (" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_push_without_a_registry_says_why(bookworm: str, docker_folder: Path) -> None:
    docker("tag", bookworm, "127.0.0.1:5013/team/base:1")
    job = write_job(docker_folder, "127.0.0.1:5013/team/base:1", bookworm, "debian-12", name="nowhere.toml")
    done = clipship("image", "push", str(job), code=1)
    assert "was not pushed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["", "clipship-test:never-built"])
def test_an_image_that_is_not_there_is_said_in_a_line(default_image: Built, name: str) -> None:
    done = clipship("image", "verify", name, code=1)
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_base_that_is_not_there_is_named_as_the_likely_cause(default_image: Built, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(re.sub(r'base = "[^"]*"', 'base = "127.0.0.1:5013/none:1"', default_image.job.read_text()))
    done = clipship("image", "build", str(job), "--any-disk", code=1)
    assert "the build failed" in done.stderr
    assert "likely cause: the base image is not on this machine" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_daemon_is_said_in_a_line(default_image: Built) -> None:
    done = clipship("image", "build", str(default_image.job), DOCKER_HOST="unix:///nowhere.sock", code=1)
    assert len(done.stderr.splitlines()) == 1
    assert "does not answer" in done.stderr


def _measured(full: Built, again: Built) -> tuple[float, str]:
    """Size of the image against the wheels, and for a person what the sizes and the times are."""
    image = int(docker("inspect", "--format={{.Size}}", full.tag))
    own = int(in_image(full.tag, "python", "-c", _WHEEL_SIZES).stdout)
    steps = len(re.findall(r"^Step ", full.output, re.MULTILINE))
    cached = full.output.count("Using cache")
    return image / own, (
        f"image {image / 1e9:.2f} GB; torch, torchvision, pyarrow and what they need {own / 1e9:.2f} GB: "
        f"{image / own:.3f} times\n"
        f"build {full.seconds:.0f} s with {cached} of {steps} steps in the cache; "
        f"after a change in the trainer {again.seconds:.0f} s"
    )
