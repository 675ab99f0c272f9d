"""Networks between nodes: the table, what a job gets, what is refused, and how they are explained."""

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.support import command_line
from tests.support.command_line import Said, clipship
from tests.support.kubernetes_jobs import FABRIC_KEYS, FABRIC_STACKS, kubernetes_job, objects_of
from trainer.config import fabrics
from trainer.config.loader import own_keys
from trainer.errors import InputError
from trainer.image.dockerfile import dockerfile
from trainer.launch.kubernetes.manifest import manifest

ONLY_2_28 = fabrics.NcclRange("2.28", "2.28", "a reason", "a source")


def fabric_job(name: str, **sections: Any) -> Any:
    given = {"resources": {"fabric": name}, "stack": FABRIC_STACKS.get(name, {})}
    return kubernetes_job(**{**given, "kubernetes": FABRIC_KEYS[name], **sections})


def render(form: str, job: Any, *words: str) -> Said:
    """Renders a job; returns the exit code, the text, and what is said beside it."""
    return command_line.render(form, own_keys(job), *words)


@pytest.mark.parametrize("name", fabrics.FABRICS)
def test_each_line_has_its_reason_and_source(name: str) -> None:
    text = clipship("fabrics", "explain", name, code=0).out
    for _, lines in fabrics.FABRICS[name].sections:
        for line in lines:
            assert line.why
            assert line.source
            assert f"{line.name} = {line.value}\n{'':14}{line.why}\n{'':14}source: {line.source}\n" in text


def test_the_list_names_every_fabric_and_an_unknown_one_is_bad_input() -> None:
    assert [line.split()[0] for line in clipship("fabrics", code=0).out.splitlines()] == [
        "fabric",
        *fabrics.FABRICS,
    ]
    assert "use one of ib, roce, efa" in clipship("fabrics", "explain", "token-ring", code=2).err


def test_a_job_that_does_not_name_the_clusters_networks_is_refused() -> None:
    with pytest.raises(InputError, match=r'kubernetes.worker_annotations."networking.gke.io/interfaces"'):
        manifest(kubernetes_job(resources={"fabric": "tcpxo"}, stack=FABRIC_STACKS["tcpxo"]))


def test_a_fabric_of_pods_is_refused_on_slurm() -> None:
    code, _, said = render(
        "slurm", kubernetes_job(resources={"fabric": "tcpxo"}, slurm={"container": "none"})
    )
    assert code == 2
    assert re.search(r"does not work with \[slurm\]: .* use \[kubernetes\]", said)


@pytest.mark.parametrize("door", ["kubernetes", "slurm", "dockerfile", "apptainer"])
def test_every_text_of_a_stack_that_does_not_fit_is_refused(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the nodes' own Python is not compared with the stack."""
    monkeypatch.setitem(fabrics.FABRICS, "ib", replace(fabrics.FABRICS["ib"], nccl=ONLY_2_28))
    job = fabric_job("ib", slurm={"container": "pyxis"})
    code, _, said = render(door, job)
    assert code == 2
    assert "needs NCCL 2.28 (a reason), but torch 2.14.1 brings 2.30.7: set stack.torch to 2.11.0" in said
    assert render(door, job, "--set", "stack.torch=2.11.0")[0] == 0
    if door == "slurm":
        assert render(door, job, "--set", "slurm.container=apptainer")[0] == 2
        assert render(door, job, "--set", "slurm.container=none")[0] == 0


def test_an_image_for_other_processors_than_the_networks_nodes_have_is_refused() -> None:
    job = fabric_job("tcpxo", image={"platform": "linux/arm64"})
    for text in (manifest, dockerfile):
        with pytest.raises(InputError, match=r'needs image\.platform = "linux/amd64" \(the nodes of A3 Mega'):
            text(job)
    assert manifest(fabric_job("efa", image={"platform": "linux/arm64"}))


def test_a_newer_nccl_than_that_of_a_torch_that_fits_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"needs NCCL 2\.28 .*, but stack\.nccl = 2\.32\.3: leave stack\.nccl"
    ):
        manifest(fabric_job("tcpxo", stack={"torch": "2.11.0", "nccl": "2.32.3"}))


OWN_TORCH = {"torch": "base"}
OWN_BASE = {"base": "registry.example/nvidia/pytorch:1", "os": "ubuntu-24.04"}


def test_the_nccl_of_a_base_is_compared_if_the_job_states_it() -> None:
    job = fabric_job("tcpxo", stack={**OWN_TORCH, "nccl": "2.27.5"}, image=OWN_BASE)
    for text in (manifest, dockerfile):
        with pytest.raises(InputError, match=r"but stack\.nccl = 2\.27\.5: take a base with such an NCCL"):
            text(job)
    assert manifest(fabric_job("tcpxo", stack={**OWN_TORCH, "nccl": "2.28.7"}, image=OWN_BASE))


def test_the_nccl_of_a_base_that_nobody_states_is_named() -> None:
    said = render("kubernetes", fabric_job("tcpxo", stack=OWN_TORCH, image=OWN_BASE))[2]
    assert "set stack.nccl, to which the build then holds the image" in said
    assert "stack.nccl" not in render("kubernetes", fabric_job("tcpxo"))[2]


def test_the_jobs_own_variables_win_and_are_named() -> None:
    job = fabric_job("ib", env={"NCCL_NET": "Socket"}, kubernetes={"kind": "job"})
    assert variables_of(job)["NCCL_NET"] == {"name": "NCCL_NET", "value": "Socket"}
    said = render("kubernetes", job)[2]
    assert "NCCL_NET = IB, but the job sets Socket, which wins" in said
    assert "which wins" not in render("kubernetes", fabric_job("ib", env={"NCCL_NET": "IB"}))[2]
    job = fabric_job("ib", kubernetes={"kind": "job", "env": {"NCCL_NET": "configmap:site:net"}})
    assert "valueFrom" in variables_of(job)["NCCL_NET"]


@pytest.mark.parametrize(
    ("rdma", "said"), [({}, True), ({"rdma/x": 1}, True), (FABRIC_KEYS["efa"]["rdma"], False)]
)
def test_pods_without_the_networks_adapters_are_named(rdma: dict[str, int], said: bool) -> None:
    job = fabric_job("efa", kubernetes={"rdma": rdma})
    assert ("no container gets an adapter" in render("kubernetes", job)[2]) is said


MULTUS = {"worker_annotations": {"k8s.v1.cni.cncf.io/networks": "rail-0"}}


OFF_NODES: dict[str, Any] = {"patch": {"worker": {"spec": {"hostNetwork": False}}}}


@pytest.mark.parametrize(("keys", "said"), [(OFF_NODES, True), ({}, False), ({**OFF_NODES, **MULTUS}, False)])
def test_an_adapter_without_an_address_in_the_pod_is_named(keys: dict[str, Any], said: bool) -> None:
    job = fabric_job("roce", kubernetes={**FABRIC_KEYS["roce"], **keys})
    assert ("an interface of their own" in render("kubernetes", job)[2]) is said


def spec_of_pods(job: Any) -> Any:
    [pods] = [item for item in objects_of(manifest(job)) if item["kind"] == "Job"]
    return pods["spec"]["template"]["spec"]


def variables_of(job: Any) -> dict[str, Any]:
    """The variables of the container with the ranks, by name."""
    return {entry["name"]: entry for entry in spec_of_pods(job)["containers"][0]["env"]}
