"""A Docker daemon for tests: the machine's own where one runs, else one that is started here; and bases made
with debootstrap.
"""

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_PATIENCE_S = 60


@contextmanager
def daemon(folder: Path) -> Iterator[None]:
    """Images and layers stay for the next time; a daemon that was started here is stopped."""
    if _answers({}):
        yield
        return
    with dockerd(folder / "dockerd.log"):
        yield


@contextmanager
def dockerd(log: Path, *options: str, **variables: str) -> Iterator[None]:
    """A daemon that is started here, and stopped; `variables` say to the docker command where it is."""
    with (
        log.open("wb") as output,
        subprocess.Popen(["nice", "dockerd", *options], stdout=output, stderr=output) as process,
    ):
        try:
            _wait_for(process, log, variables)
            yield
        finally:
            process.terminate()


def base(suite: str, folder: Path) -> str:
    """The name of a minimal Debian as an image of the local daemon; made once."""
    name = f"clipship-test-base:{suite}"
    if not docker("images", "--quiet", name).strip():
        root = folder / suite
        script = Path("/usr/share/debootstrap/scripts") / suite
        subprocess.run(
            ["debootstrap", "--variant=minbase", suite, str(root), mirror()]
            + [str(script)] * script.exists(),
            check=True,
        )
        with subprocess.Popen(
            ["tar", "-C", str(root), "--exclude=./var/cache/apt", "--exclude=./var/lib/apt/lists", "-c", "."],
            stdout=subprocess.PIPE,
        ) as tar:
            subprocess.run(["docker", "import", "-", name], stdin=tar.stdout, check=True)
        subprocess.run(["rm", "-rf", "--one-file-system", str(root)], check=True)
    return name


def images() -> set[str]:
    """All that the daemon has, the stages without a name too."""
    return set(docker("images", "--all", "--quiet", "--no-trunc").split())


def remove(identities: set[str]) -> None:
    """Those images and their names, and no other: what they began with stays.

    In rounds, for children go first.
    """
    while identities:
        subprocess.run(
            ["docker", "rmi", "--force", "--no-prune", *identities], capture_output=True, check=False
        )
        left = identities & images()
        assert left != identities, f"docker keeps {', '.join(left)}"
        identities = left


def certificates() -> tuple[str, ...]:
    """Returns the certificates that this machine's own pip trusts beside the usual ones."""
    named = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    return (named,) if named and Path(named).is_file() else ()


def docker(*words: str) -> str:
    """Returns the command's stdout; raises with its stderr."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"docker {' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def mirror() -> str:
    """Returns the sources of this machine's own packages."""
    text = "\n".join(
        path.read_text()
        for path in sorted(Path("/etc/apt").glob("sources.list*/*.*"))
        + sorted(Path("/etc/apt").glob("sources.list"))
    )
    found = re.search(r"^(?:URIs:|deb(?: \[[^]]*\])?) (https?://\S+/debian)/?\s", text, re.MULTILINE)
    assert found, "no Debian mirror in /etc/apt"
    return found[1]


def wait_for_port(port: int) -> None:
    """Until somebody listens there, on loopback."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        assert time.monotonic() < deadline, f"nobody listens on port {port}"
        time.sleep(0.1)


def _answers(variables: Mapping[str, str]) -> bool:
    return subprocess.run(["docker", "info"], env=os.environ | variables, capture_output=True).returncode == 0


def _wait_for(process: "subprocess.Popen[bytes]", log: Path, variables: Mapping[str, str]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not _answers(variables):
        gave_up = process.poll() is not None or time.monotonic() > deadline
        assert not gave_up, f"dockerd does not start:\n{log.read_text()[-2000:]}"
        time.sleep(0.5)
