"""Builds images for tests through the command line, and looks into them."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from tests.cluster.image.daemon import certificates
from trainer.config.loader import load_job
from trainer.image.context import context, write_folder

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Sshd:
    """Who starts the ssh daemon of an image, and how."""

    user: str
    home: str
    command: str
    port: int


SSHD_OF_ROOT = Sshd("0", "/root", "/usr/sbin/sshd -De", 22)
SSHD_OF_USER = Sshd("1000", "/home/clipship", "/usr/sbin/sshd -De -f /opt/clipship/etc/sshd_config", 2222)


@dataclass(frozen=True)
class Built:
    """An image, how long its build took, and what the builder said."""

    tag: str
    job: Path
    seconds: float
    output: str


def write_job(
    folder: Path, tag: str, base: str, system: str, *, name: str = "job.toml", **image: Any
) -> Path:
    """A job file that names the image; `image` are more keys of [image], `stack` those of [stack]."""
    stack = image.pop("stack", {})
    site = {"certificates": list(certificates()), **image.pop("site", {})}
    table = {
        "name": "image-test",
        "data": {"format": "synthetic", "synthetic_samples": 64},
        "optim": {"global_batch_size": 16, "steps": 1, "warmup_steps": 0},
        "stack": stack,
        "image": {"tag": tag, "base": base, "os": system, "site": site, **image},
    }
    path = folder / name
    path.write_text(tomli_w.dumps(table))
    return path


def clipship(
    *words: str, code: int | None = None, root: Path = ROOT, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """The command line of the checkout at `root`, which must end with the code, if one is given."""
    environment = {**os.environ, "PYTHONPATH": str(root), **variables}
    # From that folder: Python looks for the trainer in the working folder first.
    command = [sys.executable, "-m", "trainer.cli.main", *words]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert code in (None, done.returncode), done.stderr[-6000:]
    return done


def build(job: Path, tag: str, root: Path = ROOT) -> Built:
    """Raises with the builder's last lines where it fails.

    Layers of before need little new room, so none is asked for.
    """
    started = time.monotonic()
    done = clipship("image", "build", str(job), "--any-disk", code=0, root=root)
    assert done.stdout.startswith("sha256:")
    return Built(tag, job, time.monotonic() - started, done.stderr)


def changed_copy(folder: Path) -> None:
    """A copy of the checkout whose code was never built before: docker keeps the layers of earlier runs."""
    for name in ("trainer", "docker", "slurm", "k8s"):
        kept = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=kept)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    with (folder / "trainer/image/selftest.py").open("a") as file:
        file.write(f"# changed: {uuid.uuid4()}\n")


def build_stage(name: str, job: Path, tag: str) -> None:
    """A stage of a job's image, from the cache of its build: of the very same bytes, as the builder compares
    them.
    """
    with tempfile.TemporaryDirectory(dir=job.parent) as folder:
        write_folder(context(load_job(job)), Path(folder))
        done = subprocess.run(
            ["docker", "build", f"--target={name}", f"--tag={tag}", folder], capture_output=True, text=True
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def over_ssh(tag: str, command: str, sshd: Sshd) -> str:
    """Returns the output of a command that the holder of the job's key runs over ssh in a container."""
    script = f"""set -e
        mkdir -p {sshd.home}/.ssh; cd {sshd.home}/.ssh
        ssh-keygen -q -t ecdsa -N '' -f id_rsa; cp id_rsa.pub authorized_keys
        {sshd.command} 2>/tmp/sshd.log &
        for _ in $(seq 600); do (: </dev/tcp/localhost/{sshd.port}) 2>/dev/null && break; sleep 0.1; done
        ssh -p {sshd.port} localhost {shlex.quote(command)} || {{ cat /tmp/sshd.log; exit 1; }}"""
    done = in_image(tag, "bash", "-c", script, options=(f"--user={sshd.user}",))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_image(
    tag: str, *command: str, options: tuple[str, ...] = (), network: str = "none"
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a container that is removed afterwards."""
    words = ["docker", "run", "--rm", f"--network={network}", "--shm-size=1g", *options, tag, *command]
    return subprocess.run(words, capture_output=True, text=True)
