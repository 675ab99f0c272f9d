"""Kueue's own controller beside the cluster of KUBECONFIG, and a queue with a small quota.

The controller is built once from its Go module, which needs Go and minutes, and kept in a cache. It runs on
this machine: the API server must reach this machine's loopback for its webhooks, as it does where it runs
here. Where Kueue is installed already, that one is used.
"""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from kubernetes import client

from tests.cluster.kubernetes.crds import Crd as Kind
from tests.cluster.kubernetes.crds import read
from trainer.launch.kubernetes.cluster import Cluster

MODULE, VERSION = "sigs.k8s.io/kueue", "v0.17.0"
GROUP = "kueue.x-k8s.io"
FRAMEWORKS = ["batch/job", "kubeflow.org/mpijob"]
SERVED = (GROUP, "batch", "kubeflow.org")
"""Groups of the kinds whose webhooks the controller answers."""
CHANGES = {
    "/etc/kueue/metrics/certs": ".",
    'return nil, fmt.Errorf("failed to fetch kubernetes server version: %w", err)': (
        'setupLog.Error(err, "The API server says no version")'
    ),
}
"""Changes of the program's main file: a certificate that it wants in a fixed place, and its end where an API
server that was built from its source says no version.
"""
HOST = "127.0.0.1"


def source() -> Path:
    """Returns the folder of Kueue's source; its Go module is downloaded once."""
    if shutil.which("go") is None:
        pytest.skip(f"the cluster has no Kueue, and here is no Go to build {MODULE} {VERSION} with")
    words = ["go", "mod", "download", "-json", f"{MODULE}@{VERSION}"]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    return Path(json.loads(answer.stdout)["Dir"])


def controller(code: Path) -> Path:
    """Returns the controller's program, built once, with CHANGES and no others."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipship"
    program = cache / f"kueue-{VERSION}"
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            ours = Path(folder, "source")
            shutil.copytree(code, ours, copy_function=shutil.copyfile)
            subprocess.run(["chmod", "-R", "u+w", ours], check=True)
            main = ours / "cmd" / "kueue" / "main.go"
            text = main.read_text()
            for was, becomes in CHANGES.items():
                assert was in text, f"{MODULE} {VERSION} has no {was}"
                text = text.replace(was, becomes)
            main.write_text(text)
            words = ["go", "build", "-trimpath", "-ldflags=-s -w", "-o", "../built", "./cmd/kueue"]
            subprocess.run(words, cwd=ours, check=True)
            Path(folder, "built").rename(program)
    return program


@contextmanager
def running(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Runs Kueue, with its kinds and webhooks and a log in the folder; nothing of it is left after."""
    code = source()
    program, port = controller(code), _free_port()
    _certificate(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(_settings(port, folder)))
    hooks, kinds = folder / "webhooks.yaml", code / "config" / "components" / "crd" / "bases"
    ca = (folder / "tls.crt").read_bytes()
    hooks.write_text(yaml.safe_dump_all(_webhooks(code, f"https://{HOST}:{port}", ca, cluster.namespace)))
    kubectl("apply", "--server-side", "-f", kinds)
    kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", kinds)
    log = folder / "kueue.log"
    with log.open("w") as output:
        words = [str(program), "--config", str(folder / "config.yaml")]
        process = subprocess.Popen(words, cwd=folder, stdout=output, stderr=output)
    try:
        _until_it_answers(process, port, log)
        kubectl("apply", "-f", hooks)
        yield
    finally:
        kubectl("delete", "--ignore-not-found", "-f", hooks)
        # Kueue lets go of its objects itself
        kubectl("delete", "--ignore-not-found", "--timeout=60s", "-f", kinds)
        process.terminate()
        process.wait(60)


def _settings(port: int, folder: Path) -> Kind:
    return {
        "apiVersion": f"config.{GROUP}/v1beta2",
        "kind": "Configuration",
        "namespace": "kube-system",  # in its own, Kueue starts no jobs
        "health": {"healthProbeBindAddress": "0"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": HOST, "port": port, "certDir": str(folder)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": FRAMEWORKS},
        "featureGates": {"VisibilityOnDemand": False},
    }


def installed(cluster: Cluster) -> bool:
    """Returns whether the cluster has Kueue's kinds."""
    return GROUP in {group.name for group in client.ApisApi(cluster.api).get_api_versions().groups}


def _webhooks(code: Path, url: str, ca: bytes, namespace: str) -> Iterator[Kind]:
    """Yields Kueue's webhooks of the kinds in use, answered at the address, for this namespace's objects."""
    for found in read(code / "config" / "components" / "webhook" / "manifests.yaml"):
        found["metadata"]["name"] = f"{GROUP}-{found['metadata']['name']}"
        found["webhooks"] = [hook for hook in found["webhooks"] if hook["rules"][0]["apiGroups"][0] in SERVED]
        for hook in found["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": url + path, "caBundle": b64encode(ca).decode()}
            hook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
        yield found


def _certificate(folder: Path) -> None:
    """Makes a certificate of this machine's loopback, which signs itself."""
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kueue"]
    files = ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    subprocess.run([*words, "-addext", f"subjectAltName=IP:{HOST}", *files], check=True, capture_output=True)


def kubectl(*words: str | Path) -> None:
    subprocess.run(["kubectl", *words], check=True, stdout=subprocess.DEVNULL)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def _until_it_answers(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + 120
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"Kueue does not answer:\n{log.read_text()[-3000:]}")
        time.sleep(0.2)


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False
