"""Controllers of other projects beside the cluster of KUBECONFIG: Kueue, JobSet and Kubeflow Trainer.

Each is built once from its Go module, which needs Go and minutes, and kept in a cache. It runs on this
machine: the API server must reach this machine's loopback for its webhooks, as it does where it runs here.
Where a cluster has a controller's kinds already, that one is used.
"""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
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
class Controller:
    """One program. Folders are those of its module; it runs in a folder that has its certificate."""

    name: str
    module: str
    version: str
    main: str
    """Folder of the program's source."""
    kinds: str
    """Folder of its definitions."""
    webhooks: str
    """File of its webhooks."""
    group: str
    """Group of its kinds."""
    served: tuple[str, ...]
    """Groups of the kinds whose webhooks it answers."""
    settings: Kind = field(default_factory=dict)
    """Content of its file of settings beside that of any controller; empty for one that reads no file."""
    flags: tuple[str, ...] = ("--config=config.yaml",)
    """Words of its command line; {port} is that of its webhooks."""
    changes: Mapping[str, str] = field(default_factory=dict)
    """Changes of the program's main file, without which it would not run here."""

    @property
    def module_version(self) -> str:
        return f"{self.module}@{self.version}"


KUEUE = Controller(
    name="Kueue",
    module="sigs.k8s.io/kueue",
    version="v0.17.0",
    main="cmd/kueue",
    kinds="config/components/crd/bases",
    webhooks="config/components/webhook/manifests.yaml",
    group="kueue.x-k8s.io",
    served=("kueue.x-k8s.io", "batch", "kubeflow.org"),
    settings={
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "namespace": "kube-system",  # in its own, Kueue starts no jobs
        "integrations": {"frameworks": ["batch/job", "kubeflow.org/mpijob"]},
        "featureGates": {"VisibilityOnDemand": False},
    },
    changes={
        # A certificate that it wants in a fixed place.
        "/etc/kueue/metrics/certs": ".",
        # An API server that was built from its source says no version.
        'return nil, fmt.Errorf("failed to fetch kubernetes server version: %w", err)': (
            'setupLog.Error(err, "The API server says no version")'
        ),
    },
)
JOBSET = Controller(
    name="JobSet",
    module="sigs.k8s.io/jobset",
    version="v0.8.0",
    main=".",
    kinds="config/components/crd/bases",
    webhooks="config/components/webhook/manifests.yaml",
    group="jobset.x-k8s.io",
    served=("jobset.x-k8s.io", ""),
    settings={"apiVersion": "config.jobset.x-k8s.io/v1alpha1"},
)
TRAINER = Controller(
    name="Kubeflow Trainer",
    module="github.com/kubeflow/trainer/v2",
    version="v2.0.0",
    main="cmd/trainer-controller-manager",
    kinds="manifests/base/crds",
    webhooks="manifests/base/webhook/manifests.yaml",
    group="trainer.kubeflow.org",
    served=("trainer.kubeflow.org",),
    flags=("--webhook-server-port={port}", "--health-probe-bind-address=0"),
    changes={
        # It has no flag for another certificate than one that it makes for a Service of its own.
        "cert.ManageCerts(mgr, cert.Config{": (
            "func(_ cert.Config, ready chan struct{}) error { close(ready); return nil }(cert.Config{"
        ),
        "Port:    webhookServerPort,": f'Host: "{HOST}", Port: webhookServerPort, CertDir: ".",',
    },
)


@contextmanager
def controlled(cluster: Cluster, *rows: Controller) -> Iterator[Path]:
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
def _running(row: Controller, cluster: Cluster, folder: Path) -> Iterator[None]:
    """Runs a controller with its kinds and webhooks and a log in the folder; nothing of it is left after."""
    code = _source(row)
    program, port = _built(row, code), _free_port()
    _certificate(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(_settings(row, port)))
    hooks, kinds = folder / "webhooks.yaml", _kinds(row, code)
    ca = (folder / "tls.crt").read_bytes()
    hooks.write_text(
        yaml.safe_dump_all(_webhooks(row, code, f"https://{HOST}:{port}", ca, cluster.namespace))
    )
    define(cluster, kinds)
    log = folder / "log"
    with log.open("w") as output:
        words = [str(program), *(flag.format(port=port) for flag in row.flags)]
        process = subprocess.Popen(words, cwd=folder, stdout=output, stderr=output)
    try:
        _until_it_answers(row, process, port, log)
        kubectl("apply", "-f", hooks)
        yield
    finally:
        kubectl("delete", "--ignore-not-found", "-f", hooks)
        remove(cluster, kinds)  # the controller lets go of its objects itself
        process.terminate()
        process.wait(60)


def _source(row: Controller) -> Path:
    """Returns the folder of the controller's source; its Go module is downloaded once."""
    if shutil.which("go") is None:
        pytest.skip(f"the cluster has no {row.name}, and here is no Go to build {row.module_version} with")
    words = ["go", "mod", "download", "-json", row.module_version]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    return Path(json.loads(answer.stdout)["Dir"])


def _built(row: Controller, code: Path) -> Path:
    """Returns the controller's program, built once, with the row's changes and no others."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipship"
    program = cache / f"{row.group.partition('.')[0]}-{row.version}"
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            ours = Path(folder, "source")
            shutil.copytree(code, ours, copy_function=shutil.copyfile)
            subprocess.run(["chmod", "-R", "u+w", ours], check=True)
            main = ours / row.main / "main.go"
            text = main.read_text()
            for was, becomes in row.changes.items():
                assert was in text, f"{row.module_version} has no {was}"
                text = text.replace(was, becomes)
            main.write_text(text)
            words = ["go", "build", "-trimpath", "-ldflags=-s -w", "-o", "../built", f"./{row.main}"]
            subprocess.run(words, cwd=ours, check=True)
            Path(folder, "built").rename(program)
    return program


def _kinds(row: Controller, code: Path) -> list[Kind]:
    """Returns the controller's definitions."""
    found = [crd for file in sorted((code / row.kinds).glob(f"{row.group}_*.yaml")) for crd in read(file)]
    assert found, f"{row.module_version} has no definitions in {row.kinds}"
    return found


def _settings(row: Controller, port: int) -> Kind:
    return {
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": "0"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": HOST, "port": port, "certDir": "."},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        **row.settings,
    }


def _webhooks(row: Controller, code: Path, url: str, ca: bytes, namespace: str) -> Iterator[Kind]:
    """Yields the webhooks of the kinds in use, answered at the address, for this namespace's objects."""
    for found in read(code / row.webhooks):
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


def kubectl(*words: str | Path) -> None:
    subprocess.run(["kubectl", *words], check=True, stdout=subprocess.DEVNULL)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def _until_it_answers(row: Controller, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + 120
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"{row.name} does not answer:\n{log.read_text()[-3000:]}")
        time.sleep(0.2)


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False
