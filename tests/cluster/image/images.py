"""Builds images for tests through the command line, and looks into them."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from tests.cluster.image.daemon import certificates

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Built:
    """An image, how long its build took, and what the builder said."""

    tag: str
    job: Path
    seconds: float
    output: str


def write_job(folder: Path, tag: str, base: str, system: str, *, name: str = "job.toml", **image: Any) -> Path:
    """A job file that names the image; `image` are more keys of [image], `stack` those of [stack]."""
    stack = image.pop("stack", {})
    site = {"certificates": list(certificates()), **image.pop("site", {})}
    table = {
        "name": "image-test",
        "data": {"train": "none", "format": "synthetic", "synthetic_samples": 64},
        "optim": {"global_batch_size": 16, "steps": 1, "warmup_steps": 0},
        "stack": stack,
        "image": {"tag": tag, "base": base, "os": system, "site": site, **image},
    }
    path = folder / name
    path.write_text(tomli_w.dumps(table))
    return path


def clipship(*words: str, root: Path = ROOT, **variables: str) -> "subprocess.CompletedProcess[str]":
    """The command line of the checkout at `root`."""
    environment = {**os.environ, "PYTHONPATH": str(root), **variables}
    return subprocess.run([sys.executable, "-m", "trainer.launch.cli", *words], env=environment, capture_output=True, text=True)


def build(job: Path, tag: str, root: Path = ROOT) -> Built:
    """Raises with the builder's last lines where it fails. Layers of before need little new room, so none is asked for."""
    started = time.monotonic()
    done = clipship("image", "build", str(job), "--any-disk", root=root)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.startswith("sha256:")
    return Built(tag, job, time.monotonic() - started, done.stderr)


def in_image(tag: str, *command: str, options: tuple[str, ...] = (), network: str = "none") -> "subprocess.CompletedProcess[str]":
    """Run a command in a container that is removed afterwards."""
    words = ["docker", "run", "--rm", f"--network={network}", "--shm-size=1g", *options, tag, *command]
    return subprocess.run(words, capture_output=True, text=True)
