"""Two hosts on one machine, which ssh knows as node-a and node-b.

Each has an sshd with keys, config and a port of its own.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.processes import until
from trainer.sysinfo.addresses import free_port

ADDRESSES = {"node-a": "127.0.0.1", "node-b": "127.0.0.2"}


def missing_program() -> str | None:
    """Names a program of openssh-client or openssh-server that is missing; None if all are there."""
    return next((name for name in ("ssh", "ssh-keygen", "sshd") if _program(name) is None), None)


@contextmanager
def two_hosts(folder: Path) -> Iterator[Path]:
    """Starts both hosts and gives a folder to put first on PATH.

    The `ssh` in it knows the hosts, as a user's ~/.ssh/config would.
    """
    make_keys(folder)
    with ExitStack() as running:
        places = {}
        for name, address in ADDRESSES.items():
            places[name] = address, free_port(address)
            running.enter_context(sshd(folder, name, *places[name]))
        yield client(folder, places)


def make_keys(folder: Path) -> None:
    """Makes the key of the hosts and the key of their client."""
    for key in ("host_key", "client_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)


@contextmanager
def sshd(folder: Path, name: str, address: str, port: int, around: Sequence[str] = ()) -> Iterator[None]:
    """A server, once it listens; `around` starts it, in a network of its own for example."""
    settings = {
        "ListenAddress": address,
        "Port": port,
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "client_key.pub",
        "PidFile": "none",
        "StrictModes": "no",  # a test folder lies below /tmp, which everybody may write
        "UsePAM": "no",
    }
    config = folder / f"{name}.conf"
    config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    with listening(["-f", str(config)], folder / f"{name}.log", around):
        yield


@contextmanager
def listening(words: Sequence[str], log: Path, around: Sequence[str] = ()) -> Iterator[None]:
    """An sshd with these words on its command line, once it listens."""
    program = _program("sshd")
    assert program is not None
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it as root and leaves making it to the service
    with subprocess.Popen([*around, program, "-D", *words, "-E", str(log)]) as server:
        try:
            until(lambda: "Server listening" in _said(log), server, limit_s=20, otherwise=lambda: _said(log))
            yield
        finally:
            server.terminate()


def client(folder: Path, places: Mapping[str, tuple[str, int]]) -> Path:
    """A folder with an `ssh` that knows hosts by name: address and port."""
    hosts = "".join(
        f"Host {name}\n  HostName {address}\n  Port {port}\n" for name, (address, port) in places.items()
    )
    common = f"Host *\n  IdentityFile {folder}/client_key\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n"
    config = folder / "ssh_config"
    config.write_text(f"{hosts}{common}  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n")
    wrapper = folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {_program("ssh")} -F {config} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper.parent


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin")


def _said(log: Path) -> str:
    return log.read_text() if log.exists() else "no log"
