"""podman and buildah for tests: a storage of their own, an ordinary user, a small base, a registry."""

import json
import os
import resource
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.image.daemon import wait_for_port
from trainer.sysinfo.addresses import free_port

USER = "clipship-test-user"
PROGRAMS = ("cat", "df", "id", "sh", "tar", "true")


@dataclass(frozen=True)
class Storage:
    """A place of images: its folder, its user, and what podman and buildah are told of it."""

    folder: Path
    user: str | None
    variables: dict[str, str]

    def run(self, *words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command as the storage's user."""
        names: dict[str, Any] = {"user": self.user, "group": self.user, "extra_groups": []}
        whose = names if self.user else {}
        environment = {**os.environ, **self.variables}
        return subprocess.run(
            words, env=environment, capture_output=True, text=True, cwd=self.folder, **whose, **options
        )

    def must(self, *words: str, **options: Any) -> str:
        done = self.run(*words, **options)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout


@contextmanager
def storage(folder: Path, user: str | None) -> Iterator[Storage]:
    """A storage that is gone afterwards; images that are on the machine are not seen in it."""
    runtime, temporary = folder / "runtime", folder / "temporary"
    for path in (runtime, temporary):
        path.mkdir(mode=0o700)
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n'
        f'rootless_storage_path = "{folder}/graph"\n'
    )
    # podman raises limits where root may; a machine may forbid it even to root. Networks of other tests have
    # the address range of podman's own.
    files = min(resource.getrlimit(resource.RLIMIT_NOFILE))
    (folder / "containers.conf").write_text(
        f'[containers]\nnetns = "host"\ndefault_ulimits = ["nofile={files}:{files}", "nproc=4096:4096"]\n'
        '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    variables = {
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(runtime),
        "TMPDIR": str(temporary),
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
    }
    made = Storage(folder, user, variables)
    if user:
        for path in (folder, runtime, temporary):
            shutil.chown(path, user, user)
    try:
        yield made
    finally:
        remove = ("rm", "-rf", str(folder / "graph"), str(folder / "run"))
        made.run(*(("podman", "unshare") if user else ()), *remove)
        made.run("podman", "system", "migrate")  # ends the process that holds a user's namespace
        _unmount(folder)


def _unmount(folder: Path) -> None:
    """The storage of root is a mount of its own."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in reversed([path for path in mounted if path.startswith(f"{folder}/")]):
        subprocess.run(["umount", path], check=False)


@contextmanager
def ordinary_user() -> Iterator[str]:
    """A user with subordinate ids, as `useradd` gives them."""
    subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", USER], check=True)
    try:
        yield USER
    finally:
        subprocess.run(["userdel", USER], check=True)


def tiny_base() -> bytes:
    """Returns a tar with a few programs of this machine and what they need."""
    programs = [path for name in PROGRAMS if (path := shutil.which(name))]
    needed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout.split()
    libraries = {word for word in needed if word.startswith("/") and not word.endswith(":")}
    files = sorted({"/bin/sh", *programs, *libraries})
    return subprocess.run(["tar", "--dereference", "-c", *files], capture_output=True, check=True).stdout


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Yields the address of a registry on loopback, with its images in a folder."""
    port = free_port("127.0.0.1")
    config = folder / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}/registry}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(["docker-registry", "serve", str(config)], **quiet) as process:
        try:
            wait_for_port(port)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


def manifest(address: str, name: str, reference: str) -> tuple[str, dict[str, Any]]:
    """Returns the digest and the manifest that a registry has under a tag or a digest.

    BuildKit pushes a list of the image and of what is known of its build: then the manifest is the image's.
    """
    kinds = (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
    asked = urllib.request.Request(
        f"http://{address}/v2/{name}/manifests/{reference}", headers={"Accept": ", ".join(kinds)}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        digest, written = answer.headers["Docker-Content-Digest"], json.load(answer)
    if "manifests" in written:
        written = manifest(address, name, written["manifests"][0]["digest"])[1]
    return digest, written
