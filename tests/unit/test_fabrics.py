"""Networks between nodes: the table, what a job gets, what is refused, and how they are explained."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.support.kubernetes_jobs import FABRIC_KEYS, FABRIC_STACKS, kubernetes_job, objects_of
from trainer.cli.main import main
from trainer.config.fabrics import FABRICS, NcclRange
from trainer.config.loader import dump_job
from trainer.config.resources import Resources
from trainer.errors import InputError
from trainer.image.dockerfile import dockerfile
from trainer.launch.fabric import cluster_environment, conflicts
from trainer.launch.kubernetes.manifest import manifest
from trainer.launch.kubernetes.validate import warnings
from trainer.launch.slurm.validate import validate as validate_for_slurm

ONLY_2_28 = NcclRange("2.28", "2.28", "a reason", "a source")


def fabric_job(name: str, **sections: Any) -> Any:
    given = {
        "resources": {"fabric": name},
        "stack": FABRIC_STACKS.get(name, {}),
        "kubernetes": FABRIC_KEYS[name],
    }
    return kubernetes_job(**{**given, **sections})


def test_the_key_takes_the_rows_of_the_table() -> None:
    literal, _ = get_args(Resources.model_fields["fabric"].annotation)
    assert get_args(literal) == tuple(FABRICS)
    assert set(FABRIC_KEYS) == set(FABRICS)


@pytest.mark.parametrize("name", FABRICS)
def test_each_line_has_its_reason_and_source(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabrics", "explain", name]) == 0
    text = capsys.readouterr().out
    for _, lines in FABRICS[name].sections:
        for line in lines:
            assert line.why
            assert line.source
            assert f"{line.name} = {line.value}\n{'':14}{line.why}\n{'':14}source: {line.source}\n" in text


def test_the_list_names_every_fabric(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabrics"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["fabric", *FABRICS]


def test_an_unknown_fabric_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabrics", "explain", "token-ring"]) == 2
    assert "use one of ib, roce, efa" in capsys.readouterr().err


def test_a_job_that_does_not_name_the_clusters_networks_is_refused() -> None:
    with pytest.raises(InputError, match=r'kubernetes.worker_annotations."networking.gke.io/interfaces"'):
        manifest(kubernetes_job(resources={"fabric": "tcpxo"}, stack=FABRIC_STACKS["tcpxo"]))


def test_a_fabric_of_pods_is_refused_on_slurm() -> None:
    job = kubernetes_job(resources={"fabric": "tcpxo"})
    with pytest.raises(InputError, match=r"does not work with \[slurm\]: .* use \[kubernetes\]"):
        validate_for_slurm(job)


@pytest.mark.parametrize("door", ["kubernetes", "slurm", "dockerfile", "apptainer"])
def test_every_text_of_a_stack_that_does_not_fit_is_refused(
    door: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FABRICS, "ib", replace(FABRICS["ib"], nccl=ONLY_2_28))
    path = tmp_path / "job.toml"
    path.write_text(dump_job(fabric_job("ib", slurm={"container": "pyxis"})))
    assert main(["render", door, str(path)]) == 2
    said = capsys.readouterr().err
    assert "needs NCCL 2.28 (a reason), but torch 2.14.1 brings 2.30.7: set stack.torch to 2.11.0" in said
    assert main(["render", door, str(path), "--set", "stack.torch=2.11.0"]) == 0


def test_the_nodes_own_python_is_not_compared_with_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FABRICS, "ib", replace(FABRICS["ib"], nccl=ONLY_2_28))
    validate_for_slurm(fabric_job("ib", slurm={"container": "none"}))
    with pytest.raises(InputError, match=r"needs NCCL 2\.28"):
        validate_for_slurm(fabric_job("ib", slurm={"container": "apptainer"}))


def test_the_default_stack_is_too_new_for_tcpxo() -> None:
    with pytest.raises(InputError, match=r"needs NCCL 2\.28 .* set stack.torch to 2.11.0"):
        manifest(fabric_job("tcpxo", stack={}))


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
    job = fabric_job("tcpxo", stack=OWN_TORCH, image=OWN_BASE)
    assert any("set stack.nccl, to which the build then holds the image" in text for text in warnings(job))
    assert not any("stack.nccl" in text for text in warnings(fabric_job("tcpxo")))


def test_the_jobs_own_variables_win_and_are_named() -> None:
    job = fabric_job("ib", env={"NCCL_NET": "Socket"})
    assert cluster_environment(job, 8)["NCCL_NET"] == "Socket"
    [text] = conflicts(job)
    assert "NCCL_NET = IB, but the job sets Socket, which wins" in text
    assert not list(conflicts(fabric_job("ib", env={"NCCL_NET": "IB"})))


def test_a_job_on_the_cpu_gets_nothing_of_its_network() -> None:
    job = kubernetes_job(resources={"fabric": "ib", "device": "cpu"})
    assert "NCCL_NET" not in cluster_environment(job, 8)


def test_a_variable_from_a_secret_replaces_the_networks() -> None:
    job = fabric_job("ib", kubernetes={"kind": "job", "env": {"NCCL_NET": "configmap:site:net"}})
    [env] = [
        item["spec"]["template"]["spec"]["containers"][0]["env"]
        for item in objects_of(manifest(job))
        if item["kind"] == "Job"
    ]
    [found] = [entry for entry in env if entry["name"] == "NCCL_NET"]
    assert "valueFrom" in found


@pytest.mark.parametrize(
    ("rdma", "said"), [({}, True), ({"rdma/x": 1}, True), (FABRIC_KEYS["efa"]["rdma"], False)]
)
def test_pods_without_the_networks_adapters_are_named(rdma: dict[str, int], said: bool) -> None:
    job = fabric_job("efa", kubernetes={"rdma": rdma})
    assert any("no container gets an adapter" in text for text in warnings(job)) is said


@pytest.mark.parametrize(
    ("oldest", "newest", "version", "fits"),
    [
        ("2.21", "", "2.21.5", True),
        ("2.21", "", "2.20.9", False),
        ("2.17.1", "", "2.17.0", False),
        ("2.28", "2.28", "2.28.9", True),
        ("2.28", "2.28", "2.29.7", False),
        ("2.9", "", "2.30.7", True),
    ],
)
def test_ranges_compare_as_many_parts_as_they_have(
    oldest: str, newest: str, version: str, fits: bool
) -> None:
    assert NcclRange(oldest, newest, "", "").fits(version) is fits


MULTUS = {"worker_annotations": {"k8s.v1.cni.cncf.io/networks": "rail-0"}}


@pytest.mark.parametrize(
    ("name", "keys", "on_nodes"),
    [
        ("roce", {}, True),
        ("roce", MULTUS, False),
        ("roce", {"patch": {"worker": {"spec": {"hostNetwork": False}}}}, False),
        ("ib", {}, False),
        ("efa", {}, False),
        ("ib", {"patch": {"both": {"spec": {"hostNetwork": True}}}}, True),
    ],
)
def test_pods_use_the_nodes_network_where_their_adapters_need_it(
    name: str, keys: dict[str, Any], on_nodes: bool
) -> None:
    job = fabric_job(name, kubernetes={"kind": "job", **FABRIC_KEYS[name], **keys})
    pod = spec_of_pods(job)
    assert pod.get("hostNetwork", False) is on_nodes
    assert pod.get("dnsPolicy") == ("ClusterFirstWithHostNet" if on_nodes else None)


def test_an_adapter_without_an_address_in_the_pod_is_named() -> None:
    def said(keys: dict[str, Any]) -> bool:
        job = fabric_job("roce", kubernetes={**FABRIC_KEYS["roce"], **keys})
        return any("an interface of their own" in text for text in warnings(job))

    off_nodes = {"patch": {"worker": {"spec": {"hostNetwork": False}}}}
    assert said(off_nodes)
    assert not said({})
    assert not said({**off_nodes, **MULTUS})


def test_the_images_own_library_path_has_the_folder_of_a_nodes_plugin() -> None:
    """The pod must not replace the variable: a base's own folders would be lost."""
    job = fabric_job("tcpxo")
    assert "LD_LIBRARY_PATH" not in cluster_environment(job, 8)
    [folder] = [line.value for line in FABRICS["tcpxo"].folders if "nvidia" in line.value]
    assert f"ENV LD_LIBRARY_PATH=${{LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}}{folder}\n" in dockerfile(job)


def spec_of_pods(job: Any) -> Any:
    [pods] = [item for item in objects_of(manifest(job)) if item["kind"] == "Job"]
    return pods["spec"]["template"]["spec"]


ADDRESSED = re.compile(r"PORT|SUPERVISORS|[pP]ort: |--ssh-port|sshd_config|matchLabels")
"""Lines with a port or the name of a kind's pods: they follow from the kind, and goldens have them."""


def lines_of_network(name: str, kind: str) -> set[str]:
    """The lines that a manifest has with this network or with Ethernet, and not with both."""

    def lines(network: str) -> set[str]:
        text = manifest(fabric_job(network, kubernetes={"kind": kind, **FABRIC_KEYS[network]}))
        return {line.strip() for line in text.splitlines() if not ADDRESSED.search(line)}

    return lines(name) ^ lines("ethernet")


@pytest.mark.parametrize("kind", ["trainjob", "mpijob"])
@pytest.mark.parametrize("name", FABRICS)
def test_a_network_adds_the_same_to_each_kind_as_to_the_job_that_is_a_golden(name: str, kind: str) -> None:
    assert lines_of_network(name, kind) == lines_of_network(name, "job")
    assert (name == "ethernet") or len(lines_of_network(name, kind)) > 4
