"""Ranks in containers of a real pyxis and enroot, which pyxis.sh has built into the folder that
CLIPSHIP_PYXIS names.

The image is a minimal Debian with Python's libraries; this machine's Python and this checkout are mounted
into it. As NVIDIA's images do, it asks for all GPUs. Its variables have the names of some of the job's, which
must win. One test trains in the product's own image, if the Docker daemon has one.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.image.daemon import daemon, docker, mirror
from tests.cluster.image.images import clipship
from tests.cluster.slurm.cluster import REPOSITORY
from tests.cluster.slurm.going_on import RANK, Cell, cells, check_goes_on, processes
from tests.cluster.slurm.runs import HOSTILE, SHORT, Demo

pytestmark = [pytest.mark.pyxis, pytest.mark.timeout(3600)]

TWO_RANKS = {"nodes": 2, "gpus_per_node": 1}
OF_THE_IMAGE = {
    "NVIDIA_VISIBLE_DEVICES": "all",
    "ONLY_IMAGE": "kept",
    "OMP_NUM_THREADS": "64",
    "CLIPSHIP_TOKEN": "image",
    "LIST": "image",
    "EMPTY": "image",
    "ALSO_OF_THE_SHELL": "image",
}
OF_THE_SYSTEM = {"usr", "bin", "sbin", "lib", "lib64", "etc", "var"}
_SLOW = """\
#!/bin/sh
touch {folder}/unpacking
[ ! -e {folder}/slow ] || sleep 30
exec /usr/bin/unsquashfs "$@"
"""


@pytest.fixture(scope="module")
def container(demo: Demo) -> dict[str, object]:
    """Keys of [slurm]; where a file `slow` lies beside the demo, it takes half a minute to unpack the
    image.
    """
    assert demo.cluster.pyxis, "CLIPSHIP_PYXIS names no folder: `make test-pyxis` builds one"
    root, image = demo.folder / "root", demo.folder / "image.sqsh"
    libraries = "libssl3,libffi8,libsqlite3-0,libreadline8,libbz2-1.0,liblzma5"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={libraries}", "bookworm", str(root), mirror()],
        check=True,
    )
    (root / "workspace").mkdir()  # where the product's images have their working directory
    (root / "etc/environment").write_text("".join(f"{name}={of}\n" for name, of in OF_THE_IMAGE.items()))
    subprocess.run(
        ["mksquashfs", str(root), str(image), "-comp", "lz4", "-quiet", "-no-progress"], check=True
    )
    unsquashfs = demo.cluster.folder / "bin" / "unsquashfs"
    unsquashfs.parent.mkdir(exist_ok=True)
    unsquashfs.write_text(_SLOW.format(folder=demo.folder))
    unsquashfs.chmod(0o755)
    homes = {Path(folder).parts[1] for folder in (sys.prefix, sys.base_prefix, REPOSITORY)} - OF_THE_SYSTEM
    mounts = [f"/{home}:/{home}" for home in sorted(homes)]
    return {"container": "pyxis", "gpus": "none", "image": str(image), "mounts": mounts, "signal_lead_s": 10}


@pytest.mark.parametrize("backend", ["torch", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_ranks_train_in_containers_on_two_nodes(
    demo: Demo, container: dict[str, object], backend: str
) -> None:
    comm = {"backend": backend, "deterministic": backend == "torch"}
    job = demo.submit(backend, resources=TWO_RANKS, comm=comm, slurm=container, optim=SHORT)
    demo.completed(backend, job)
    assert demo.result(backend)["world_size"] == 2


@cells(Cell("torch", "rank"), Cell("horovod", "node", spares=1), Cell("mpi", "drained"))
def test_training_goes_on_in_the_same_job(demo: Demo, container: dict[str, object], cell: Cell) -> None:
    check_goes_on(demo, cell, container)


@pytest.mark.parametrize("deed", ["time limit", "preemption"])
def test_a_start_that_is_stopped_while_the_image_is_unpacked_goes_on_in_the_next(
    demo: Demo, container: dict[str, object], deed: str
) -> None:
    name = deed.replace(" ", "-")
    slow, unpacking = demo.folder / "slow", demo.folder / "unpacking"
    unpacking.unlink(missing_ok=True)
    slow.touch()
    partition = {"partition": "low"} if deed == "preemption" else {}
    job = demo.submit(name, resources=TWO_RANKS, slurm=container | partition, optim=SHORT)
    demo.until(unpacking.exists, "the image is not unpacked", name, job)
    slow.unlink()
    if deed == "preemption":
        demo.preempt()
    else:
        demo.cluster.run("scancel", "--batch", "--signal=USR2", job)
    demo.completed(name, job, restarts="1")
    said = demo.output(name, job)
    assert "clipship: stopped before the start; queued again" in said
    assert f"start 2 of job {job}" in said
    assert demo.result(name)["world_size"] == 2


def test_a_container_that_a_killed_removal_left_is_overridden(
    demo: Demo, container: dict[str, object]
) -> None:
    left = 'mkdir -p "/tmp/enroot-0/data/pyxis_$SLURM_JOB_ID.1"'  # step 0 looks at the run folder
    found = demo.variables("left-over", slurm=container | {"setup": [left], "python": demo.stand_in()})
    assert {variables["SLURM_STEP_ID"] for variables in found} == {"1"}


def test_a_time_limit_saves_and_the_next_start_goes_on(demo: Demo, container: dict[str, object]) -> None:
    job = demo.submit("cut", resources=TWO_RANKS, slurm=container, optim={"epochs": 3})
    demo.wait_for_step("cut", 5, job)
    demo.cluster.run("scancel", "--batch", "--signal=USR2", job)
    demo.completed("cut", job, restarts="1")
    assert "clipship: saved; queued again" in demo.output("cut", job)


def test_the_jobs_variables_win_over_those_of_the_image(
    demo: Demo, container: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the shell that submits the job do not."""
    monkeypatch.setenv("ALSO_OF_THE_SHELL", "shell")
    found = demo.variables("variables", slurm=container | {"python": demo.stand_in()}, env=HOSTILE)
    for variables in found:
        assert {key: variables[key] for key in HOSTILE} == HOSTILE
        assert (variables["NVIDIA_VISIBLE_DEVICES"], variables["ONLY_IMAGE"]) == ("void", "kept")
        assert variables["OMP_NUM_THREADS"] == "1"
        assert len(variables["CLIPSHIP_TOKEN"]) == 32
        assert variables["ALSO_OF_THE_SHELL"] == "image"
    assert len({variables["CLIPSHIP_TOKEN"] for variables in found}) == 1


def test_a_job_starts_from_the_file_that_image_squash_made(demo: Demo, container: dict[str, object]) -> None:
    """The image is that of the other tests, out of a Docker daemon, with a variable of its own."""
    if shutil.which("dockerd") is None:
        pytest.skip("no dockerd on PATH: `make test-image` installs it")
    tag, images = "clipship-test-pyxis:1", demo.folder / "images"
    images.mkdir()
    slurm = container | {"image": None, "image_dir": str(images), "python": demo.stand_in()}
    sections: dict[str, dict[str, object]] = {"slurm": slurm, "image": {"tag": tag}}
    with daemon(demo.folder):
        tar = ["tar", "-C", str(demo.folder / "root"), "-c", "."]
        with subprocess.Popen(tar, stdout=subprocess.PIPE) as root:
            change = ["--change", "ENV ONLY_IMAGE=of-docker"]
            subprocess.run(["docker", "import", *change, "-", tag], stdin=root.stdout, check=True)
        try:
            made = clipship("image", "squash", str(demo.write("squashed", **sections)))
        finally:
            docker("rmi", "--force", tag)
    assert made.returncode == 0, made.stderr
    found = demo.variables("squashed", **sections)
    script = (demo.run("squashed") / "artefacts/train.sbatch").read_text()
    assert f"--container-image={made.stdout.strip()} " in script
    assert {variables["ONLY_IMAGE"] for variables in found} == {"of-docker"}


def test_a_killed_rank_ends_the_job_and_leaves_no_container(demo: Demo, container: dict[str, object]) -> None:
    job = demo.submit("killed", resources=TWO_RANKS, slurm=container)
    demo.wait_for_step("killed", 3, job)
    os.kill(processes(demo, "n2", RANK)[0], signal.SIGKILL)
    ended = demo.wait("killed", job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0")
    last = demo.output("killed", job).splitlines()[-1]
    assert last.startswith("clipship: rank 1 on n2 ended the run with exit code 1: killed by SIGKILL in ")
    demo.until(lambda: not processes(demo, "n2", b"trainer."), "a rank is left", "killed", job)


@pytest.fixture(scope="module")
def product(demo: Demo) -> Path:
    """Image of the product as a file, from the one that CLIPSHIP_IMAGE_OPENMPI4 names in the daemon."""
    name = os.environ.get("CLIPSHIP_IMAGE_OPENMPI4")
    if name is None:
        pytest.skip("CLIPSHIP_IMAGE_OPENMPI4 names no image of the Docker daemon")
    file = demo.folder / "product.sqsh"
    enroot = demo.cluster.run(
        "enroot", "import", "--output", str(file), f"dockerd://{name}", check=False, timeout_s=1800
    )
    assert file.exists(), enroot.stderr
    return file


def test_ranks_train_in_the_products_own_image(
    demo: Demo, container: dict[str, object], product: Path
) -> None:
    own = {"image": str(product), "python": "/opt/clipship/bin/python", "mounts": []}
    job = demo.submit("product", resources=TWO_RANKS, slurm=container | own, optim=SHORT)
    demo.completed("product", job)
    assert demo.result("product")["world_size"] == 2
