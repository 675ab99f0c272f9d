"""The cluster of KUBECONFIG, a namespace of these tests' own in it, and a folder that its pods share."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from tests.cluster.kubernetes.crds import crds
from tests.cluster.kubernetes.runs import Demo
from trainer.launch.kubernetes.cluster import Cluster, connect
from trainer.launch.kubernetes.kinds import KINDS

IMAGES = {"openmpi4": "clipship-test:openmpi4", "openmpi5": "clipship-test:openmpi5"}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A missing part fails the tests: nobody asks for them by chance."""
    if "KUBECONFIG" not in os.environ:
        pytest.fail(
            "KUBECONFIG names no cluster: these tests need a Kubernetes with the MPI Operator, "
            "one node of it this machine"
        )
    found = connect(f"clipship-test-{os.getpid()}")
    with found.asking("make a namespace"):
        found.core.create_namespace({"metadata": {"name": found.namespace}})
    _wait_for_account(found)
    yield found
    found.core.delete_namespace(found.namespace)


@pytest.fixture(scope="session")
def other_kinds(cluster: Cluster) -> Iterator[None]:
    """Kinds of other projects without their controllers, where the cluster lacks them."""
    there = {group.name for group in client.ApisApi(cluster.api).get_api_versions().groups}
    missing = [crd for crd in crds() if crd["spec"]["group"] not in there]
    extensions = client.ApiextensionsV1Api(cluster.api)
    for crd in missing:
        extensions.create_custom_resource_definition(crd)
    for crd in missing:
        _wait_for_kind(cluster, crd["spec"])
    yield
    for crd in missing:
        extensions.delete_custom_resource_definition(crd["metadata"]["name"])


def _wait_for_kind(found: Cluster, spec: dict[str, Any]) -> None:
    """Waits until the API server serves a kind that has just been defined."""
    place = spec["group"], spec["versions"][0]["name"], found.namespace, spec["names"]["plural"]
    for _ in range(240):
        try:
            found.custom.list_namespaced_custom_object(*place)
            return
        except ApiException:
            time.sleep(0.5)
    pytest.fail(f"the API server does not serve {place[-1]}")


@pytest.fixture(scope="session")
def demo(cluster: Cluster) -> Iterator[Demo]:
    folder = Path(tempfile.mkdtemp(prefix="clipship-kubernetes-", dir="/var/tmp"))
    folder.chmod(0o755)
    images = {name: os.environ.get(f"CLIPSHIP_IMAGE_{name.upper()}", image) for name, image in IMAGES.items()}
    yield Demo.make(cluster, folder, images)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _leave_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test's jobs end with it: the next one has the machine for itself."""
    yield
    if "demo" in request.fixturenames:
        found: Cluster = request.getfixturevalue("cluster")
        for row in (KINDS["mpijob"], KINDS["job"]):
            found.custom.delete_collection_namespaced_custom_object(
                row.group, row.version, found.namespace, row.plural, propagation_policy="Background"
            )
        deadline = time.monotonic() + 120
        while found.core.list_namespaced_pod(found.namespace).items and time.monotonic() < deadline:
            time.sleep(0.5)


def _wait_for_account(found: Cluster) -> None:
    """Pods are refused until the namespace has its default service account."""
    for _ in range(240):
        try:
            found.core.read_namespaced_service_account("default", found.namespace)
            return
        except ApiException:
            time.sleep(0.5)
    pytest.fail("the new namespace gets no service account: is the cluster's controller manager well?")
