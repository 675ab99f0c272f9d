"""Two hosts on one machine: an sshd each, with keys, config and ports of their own, known to ssh as node-a and node-b."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trainer.launch.hosts import free_port

ADDRESSES = {"node-a": "127.0.0.1", "node-b": "127.0.0.2"}


def missing_program() -> str | None:
    """What openssh-client and openssh-server would bring, None where all is there."""
    return next((name for name in ("ssh", "ssh-keygen", "sshd") if _program(name) is None), None)


@contextmanager
def two_hosts(folder: Path) -> Iterator[Path]:
    """Starts both; gives a folder to put first on PATH, whose `ssh` knows them, as a user's ~/.ssh/config would."""
    for key in ("host_key", "client_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it as root and leaves making it to the service
    with ExitStack() as running:
        ports = {name: running.enter_context(_sshd(folder, name, address)) for name, address in ADDRESSES.items()}
        yield _client(folder, ports)


@contextmanager
def _sshd(folder: Path, name: str, address: str) -> Iterator[int]:
    port = free_port(address)
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
    program = _program("sshd")
    assert program is not None
    with subprocess.Popen([program, "-D", "-f", config, "-E", folder / f"{name}.log"]) as server:
        try:
            _wait_for(address, port)
            yield port
        finally:
            server.terminate()


def _client(folder: Path, ports: dict[str, int]) -> Path:
    hosts = "".join(f"Host {name}\n  HostName {ADDRESSES[name]}\n  Port {port}\n" for name, port in ports.items())
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


def _wait_for(address: str, port: int) -> None:
    for _ in range(100):
        with socket.socket() as client:
            if client.connect_ex((address, port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"sshd does not answer at {address}:{port}")
