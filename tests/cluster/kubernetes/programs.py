"""Controllers and schedulers of other projects beside the cluster of KUBECONFIG.

Each is built once from its Go module, which needs Go and minutes, and kept in a cache; Volcano is built from
a checkout, since its module lacks a part that it needs. They run on this machine: the API server must reach
this machine's loopback for their webhooks, as it does where it runs here. Where a cluster has a project's
kinds already, that one is used.
"""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.cluster.kubernetes.crds import Crd as Kind
from tests.cluster.kubernetes.crds import define, read, remove, serves
from trainer.launch.kubernetes.cluster import Cluster

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Program:
    """One program of a project. It runs in a folder that has its certificate and its file of settings."""

    name: str
    main: str
    """Folder of its source."""
    flags: tuple[str, ...] = ("--config=config.yaml",)
    """Words of its command line; {port} is one that it answers at, that of its webhooks if it has some."""
    changes: Mapping[str, str] = field(default_factory=dict)
    """Changes of its main file, without which it would not run here."""


@dataclass(frozen=True)
class Programs:
    """The programs of a project. Folders are those of its module."""

    name: str
    version: str
    programs: tuple[Program, ...]
    kinds: str
    """Folder of its definitions."""
    group: str
    """Group of its kinds, or of one that it alone has."""
    module: str = ""
    """Its Go module; empty for a project that cannot be had as one."""
    checkout: str = ""
    """Variable with the folder of its source, in place of a module."""
    webhooks: str = ""
    """File of the first program's webhooks."""
    served: tuple[str, ...] = ()
    """Groups of the kinds whose webhooks it answers."""
    settings: Callable[[int], Kind] = lambda _port: {}
    """Content of the first program's file of settings, made from its port."""

    @property
    def module_version(self) -> str:
        return f"{self.module}@{self.version}"


@contextmanager
def controlled(cluster: Cluster, *rows: Programs) -> Iterator[Path]:
    """Runs those of the controllers that the cluster lacks; yields an empty folder, which goes with them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clipship-controllers-")))
        for row in rows:
            if not serves(cluster, row.group):
                own = folder / row.group
                own.mkdir()
                stack.enter_context(_running(row, cluster, own))
        yield folder


@contextmanager
def _running(row: Programs, cluster: Cluster, folder: Path) -> Iterator[None]:
    """Runs a project's programs in the folder, with their kinds and webhooks; nothing of it is left after."""
    code, port = _source(row), _free_port()
    programs = [(program, _built(row, program, code)) for program in row.programs]
    ports = [port, *(_free_port() for _ in row.programs[1:])]
    _certificate(folder)
    usual = folder / "k8s-webhook-server" / "serving-certs"  # in TMPDIR, where no setting says otherwise
    usual.parent.mkdir()
    usual.symlink_to(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(row.settings(port)))
    hooks, kinds = folder / "webhooks.yaml", _kinds(row, code)
    ca = (folder / "tls.crt").read_bytes()
    hooks.write_text(
        yaml.safe_dump_all(_webhooks(row, code, f"https://{HOST}:{port}", ca, cluster.namespace))
    )
    define(cluster, kinds)
    with ExitStack() as stack:
        started = [
            stack.enter_context(_process(program, path, own, folder))
            for (program, path), own in zip(programs, ports, strict=True)
        ]
        stack.callback(remove, cluster, kinds)  # the programs let go of their objects themselves
        for process, program, own in zip(started, row.programs, ports, strict=True):
            _until_it_answers(program, process, own, folder)
        if row.webhooks:
            stack.callback(kubectl, "delete", "--ignore-not-found", "-f", hooks)
            kubectl("apply", "-f", hooks)
        yield


@contextmanager
def _process(program: Program, path: Path, port: int, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs one program until the block ends, with its log in the folder."""
    words = [flag.format(port=port, kubeconfig=os.environ["KUBECONFIG"]) for flag in program.flags]
    with (folder / f"{program.name}.log").open("w") as output:
        process = subprocess.Popen(
            [path, *words],
            cwd=folder,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(folder)},
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _source(row: Programs) -> Path:
    """Returns the folder of the project's source; its Go module is downloaded once."""
    if shutil.which("go") is None:
        pytest.skip(f"the cluster has no {row.name}, and here is no Go to build {row.version} with")
    if row.checkout:
        if row.checkout not in os.environ:
            pytest.skip(
                f"the cluster has no {row.name}: let {row.checkout} name a checkout of {row.version}, from "
                "which it is built here"
            )
        return Path(os.environ[row.checkout]).resolve()
    words = ["go", "mod", "download", "-json", row.module_version]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    return Path(json.loads(answer.stdout)["Dir"])


def _built(row: Programs, program: Program, code: Path) -> Path:
    """Returns the program, built with its changes and no others: once, and from a checkout each time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipship"
    built = cache / f"{program.name}-{row.version}"
    if row.checkout or not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            ours, made = Path(folder, "source") if program.changes else code, Path(folder, "built")
            if program.changes:
                shutil.copytree(code, ours, copy_function=shutil.copyfile)
                subprocess.run(["chmod", "-R", "u+w", ours], check=True)
            main = ours / program.main / "main.go"
            for was, becomes in program.changes.items():
                text = main.read_text()
                assert was in text, f"{row.name} {row.version} has no {was}"
                main.write_text(text.replace(was, becomes))
            words = ["go", "build", "-trimpath", "-ldflags=-s -w", "-o", str(made), f"./{program.main}"]
            subprocess.run(words, cwd=ours, check=True, env={**os.environ, "CGO_ENABLED": "0"})
            made.rename(built)
    return built


def _kinds(row: Programs, code: Path) -> list[Kind]:
    """Returns the controller's definitions."""
    found = [crd for file in sorted((code / row.kinds).glob("*_*.yaml")) for crd in read(file)]
    assert found, f"{row.name} {row.version} has no definitions in {row.kinds}"
    return found


def _webhooks(row: Programs, code: Path, url: str, ca: bytes, namespace: str) -> Iterator[Kind]:
    """Yields the webhooks of the kinds in use, answered at the address, for this namespace's objects."""
    for found in read(code / row.webhooks) if row.webhooks else ():
        found["metadata"]["name"] = f"{row.group}-{found['metadata']['name']}"
        found["webhooks"] = [
            hook for hook in found["webhooks"] if hook["rules"][0]["apiGroups"][0] in row.served
        ]
        for hook in found["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": url + path, "caBundle": b64encode(ca).decode()}
            hook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
        yield found


def _certificate(folder: Path) -> None:
    """Makes a certificate of this machine's loopback, which signs itself."""
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    files = ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    subprocess.run([*words, "-addext", f"subjectAltName=IP:{HOST}", *files], check=True, capture_output=True)


def kubectl(*words: str | Path, given: str | None = None) -> None:
    subprocess.run(["kubectl", *words], input=given, text=True, check=True, stdout=subprocess.DEVNULL)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def _until_it_answers(program: Program, process: "subprocess.Popen[bytes]", port: int, folder: Path) -> None:
    deadline = time.monotonic() + 120
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(
                f"{program.name} does not answer:\n{(folder / f'{program.name}.log').read_text()[-3000:]}"
            )
        time.sleep(0.2)


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False
