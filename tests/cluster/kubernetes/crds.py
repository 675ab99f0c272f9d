"""The kinds of Kubeflow Trainer, JobSet, Volcano and the scheduler-plugins as their projects define them.

Tests use them without their controllers. They come from the folder that CLIPSHIP_CRDS names; else each is
downloaded once, where a network allows: from its forge, else out of the Go module that the project is.
`python -m tests.cluster.kubernetes.crds FOLDER` downloads them into a folder. For each that cannot be had,
`crds.yaml` has a stand-in with no more than the fields that Clipship uses.
"""

import io
import os
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from trainer.launch.kubernetes.cluster import Cluster

Crd = dict[str, Any]

_FORGE = "https://raw.githubusercontent.com"
_GO_MODULES = "https://proxy.golang.org"


@dataclass(frozen=True)
class Project:
    """A release of a project, on its forge and as a Go module, and the folder of its definitions there."""

    name: str
    module: str
    version: str
    folder: str


_TRAINER = Project("kubeflow/trainer", "github.com/kubeflow/trainer/v2", "v2.3.0", "manifests/base/crds")
_JOBSET = Project("kubernetes-sigs/jobset", "sigs.k8s.io/jobset", "v0.12.0", "config/components/crd/bases")
_VOLCANO = Project("volcano-sh/volcano", "volcano.sh/volcano", "v1.15.1", "config/crd/volcano/bases")
_PLUGINS = Project(
    "kubernetes-sigs/scheduler-plugins", "sigs.k8s.io/scheduler-plugins", "v0.34.7", "config/crd/bases"
)
PINNED = {
    "trainer.kubeflow.org_trainjobs.yaml": (
        _TRAINER,
        "a742cafc5b5582640c7e0b7467c024fc237256fbca5ba0a9f0531dfb66d64416",
    ),
    "trainer.kubeflow.org_trainingruntimes.yaml": (
        _TRAINER,
        "69b8dbdf60a18e28cddcc2b8dfc4ce72a943e14b531b9389d593118faee4919f",
    ),
    "jobset.x-k8s.io_jobsets.yaml": (
        _JOBSET,
        "d022b87624512cf0b6741b31b24a2bea9945b5a838b50713af29332c878bb6fe",
    ),
    "scheduling.volcano.sh_podgroups.yaml": (
        _VOLCANO,
        "c297c0fdcf00cea6a35daa2b6153a8590b56df0e22a96dbfa44f773814685017",
    ),
    "scheduling.x-k8s.io_podgroups.yaml": (
        _PLUGINS,
        "e87980a29866bbf8a4df5452e03d876b6ae952c80b5443abdfaacee3b9adf60c",
    ),
}
"""Project and SHA-256 of each file."""
HAND_WRITTEN = Path(__file__).with_name("crds.yaml")


@cache
def own() -> dict[str, Crd]:
    """The projects' own definitions by name: those of a given folder, else those that can be downloaded."""
    given = os.environ.get("CLIPSHIP_CRDS")
    folder = Path(given) if given else _downloaded()
    found = [crd for path in sorted(folder.glob("*.yaml")) for crd in read(path)]
    return {crd["metadata"]["name"]: crd for crd in found}


def crds() -> list[Crd]:
    """The projects' own definitions, and for those that cannot be had the part that Clipship uses."""
    instead = {name: crd for name, crd in hand_written().items() if name not in own()}
    print(f"kinds written by hand: {', '.join(instead) or 'none'}", file=sys.stderr)
    return [*own().values(), *instead.values()]


def hand_written() -> dict[str, Crd]:
    return {crd["metadata"]["name"]: crd for crd in read(HAND_WRITTEN)}


def read(path: Path) -> list[Crd]:
    return [crd for crd in yaml.safe_load_all(path.read_text()) if crd]


def download(folder: Path, name: str) -> None:
    """Downloads a pinned file if the folder lacks it. Raises OSError without a network."""
    project, pin = PINNED[name]
    target = folder / name
    if target.is_file() and sha256(target.read_bytes()).hexdigest() == pin:
        return
    content = _content(project, name)
    found = sha256(content).hexdigest()
    if found != pin:
        raise ValueError(f"{name} of {project.name} {project.version} has the sha256 {found}, not {pin}")
    folder.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def _content(project: Project, name: str) -> bytes:
    """Returns one file of a project. Raises OSError where neither its forge nor Go's proxy answers."""
    with suppress(OSError):
        return _answer(f"{_FORGE}/{project.name}/{project.version}/{project.folder}/{name}", 10)
    archive = _module(f"{_GO_MODULES}/{project.module}/@v/{project.version}.zip")
    with ZipFile(io.BytesIO(archive)) as files:
        return files.read(f"{project.module}@{project.version}/{project.folder}/{name}")


@cache
def _module(url: str) -> bytes:
    return _answer(url, 60)


def _answer(url: str, limit_s: float) -> bytes:
    with urllib.request.urlopen(url, timeout=limit_s) as answer:
        content: bytes = answer.read()
    return content


def _downloaded() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipship" / "crds"
    for name in PINNED:
        with suppress(OSError):
            download(folder, name)
    return folder


@contextmanager
def defined(cluster: Cluster, kinds: Iterable[Crd]) -> Iterator[None]:
    """Defines those of the kinds whose group the cluster lacks; they are gone after."""
    missing = [crd for crd in kinds if not serves(cluster, crd["spec"]["group"])]
    define(cluster, missing)
    try:
        yield
    finally:
        remove(cluster, missing)


def serves(cluster: Cluster, group: str) -> bool:
    """Returns whether the cluster has kinds of the group."""
    return group in {found.name for found in client.ApisApi(cluster.api).get_api_versions().groups}


def define(cluster: Cluster, kinds: Sequence[Crd]) -> None:
    """Defines the kinds, and returns when the API server serves them."""
    for crd in kinds:
        client.ApiextensionsV1Api(cluster.api).create_custom_resource_definition(crd)
    for crd in kinds:
        _wait_for_kind(cluster, crd["spec"], served=True)


def remove(cluster: Cluster, kinds: Sequence[Crd]) -> None:
    """Deletes the kinds with all of their objects, and returns when they are gone."""
    for crd in kinds:
        client.ApiextensionsV1Api(cluster.api).delete_custom_resource_definition(crd["metadata"]["name"])
    for crd in kinds:
        _wait_for_kind(cluster, crd["spec"], served=False)


def _wait_for_kind(cluster: Cluster, spec: Crd, *, served: bool) -> None:
    """Waits until the API server serves a kind that has just been defined, or does so no more."""
    version = next(version["name"] for version in spec["versions"] if version["served"])
    place = spec["group"], version, spec["names"]["plural"]
    for _ in range(240):
        try:
            client.CustomObjectsApi(cluster.api).list_cluster_custom_object(*place)
        except ApiException:
            now = False
        else:
            now = True
        if now == served:
            return
        time.sleep(0.5)
    pytest.fail(f"the API server {'does not serve' if served else 'still serves'} {place[-1]}")


def is_part(ours: Any, theirs: Any, place: str = "") -> list[str]:
    """Places in our schema that the projects' own schema does not have, or has with another type."""
    if ours.get("x-kubernetes-preserve-unknown-fields"):
        return [] if theirs.get("type") == "object" else [place]
    wrong = [] if ours.get("type") == theirs.get("type") else [f"{place} is no {ours.get('type')}"]
    for name, inner in ours.get("properties", {}).items():
        if name not in theirs.get("properties", {}):
            wrong.append(f"{place}.{name}")
        else:
            wrong += is_part(inner, theirs["properties"][name], f"{place}.{name}")
    return wrong + (is_part(ours["items"], theirs["items"], f"{place}[]") if "items" in ours else [])


if __name__ == "__main__":
    for wanted in PINNED:
        download(Path(sys.argv[1]), wanted)
