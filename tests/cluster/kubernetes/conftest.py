"""The cluster of KUBECONFIG, a namespace of these tests' own in it, and a folder that its pods share."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kubernetes.client.exceptions import ApiException

from tests.cluster.kubernetes.crds import crds, defined
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
            "one node of it this machine; `make test-kubernetes` starts one"
        )
    found = connect(f"clipship-test-{os.getpid()}")
    with found.asking("make a namespace"):
        found.core.create_namespace({"metadata": {"name": found.namespace}})
    _wait_for_account(found)
    yield found
    found.core.delete_namespace(found.namespace)


@pytest.fixture(scope="module")
def other_kinds(cluster: Cluster) -> Iterator[None]:
    """Kinds of other projects without their controllers, where the cluster lacks them.

    They go with the module: another one runs controllers with their own.
    """
    with defined(cluster, crds()):
        yield


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
        for row in reversed(KINDS.values()):  # a TrainJob before the Job that is made of it
            with suppress(ApiException):  # a kind that the cluster does not know
                found.ask("delete", row.api_version, row.plural, propagationPolicy="Background")
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
