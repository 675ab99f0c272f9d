"""Networks between nodes: the table, what a job gets, what is refused, and how they are explained."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import command_line
from tests.support.command_line import Said, clipship
from tests.support.jobs import tiny_job
from tests.support.kubernetes_jobs import FABRIC_KEYS, FABRIC_STACKS, kubernetes_job, objects_of
from trainer.comm import cpu_binding
from trainer.config import fabrics
from trainer.config.loader import own_keys
from trainer.errors import InputError
from trainer.image.dockerfile import dockerfile
from trainer.launch.kubernetes.manifest import manifest
from trainer.sysinfo import nvml, topology
from trainer.world.launchers import World

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


# Which CPUs and network adapters are next to a GPU, on trees like /sys and /proc of real machines.

NEAR, FAR = "0000:1a:00.0", "0000:9a:00.0"
SOCKETS = {0: "0-3,8-11", 1: "4-7,12-15"}
"""CPUs of a small machine with two sockets, each core with two threads."""


class Machine:
    """Tree of a machine, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.write("sys/devices/system/cpu/online", "0-15")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def device(self, bridges: str, node: int, *, pci_class: str = "0x020000", vendor: str = "0x15b3") -> Path:
        """Adds a PCI device below these bridges: root complex, ports, the device itself."""
        place = f"sys/devices/{bridges}"
        self.write(f"{place}/vendor", vendor)
        self.write(f"{place}/class", pci_class)
        self.write(f"{place}/numa_node", str(node))
        self.write(f"{place}/local_cpulist", SOCKETS.get(node, "0-15"))
        link = self.root / "sys/bus/pci/devices" / Path(bridges).name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / place)
        return self.root / place

    def gpu(self, bridges: str, node: int) -> None:
        self.device(bridges, node, pci_class="0x030200", vendor="0x10de")

    def adapter(self, name: str, bridges: str, node: int, kind: str = "infiniband") -> None:
        link = self.root / "sys/class" / kind / name / "device"
        link.parent.mkdir(parents=True)
        link.symlink_to(self.device(bridges, node))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """With two GPUs on each of two sockets, behind a switch each."""
    made = Machine(tmp_path)
    for place, node in (("15", 0), ("95", 1)):
        bridge = place[0]
        for gpu in ("a", "b"):
            made.gpu(f"pci0000:{place}/0000:{place}:01.0/0000:{bridge}{gpu}:00.0", node)
    return made


def test_a_rank_gets_the_cpus_next_to_its_gpu(machine: Machine) -> None:
    near = topology.choose_cpus(NEAR, ranks=4, needed=4, allowed=range(16), root=machine.root)
    far = topology.choose_cpus(FAR, ranks=4, needed=4, allowed=range(16), root=machine.root)
    assert (near.cpus, far.cpus) == tuple(map(topology.cpu_numbers, SOCKETS.values()))
    assert near.reason == f"next to GPU {NEAR}, NUMA node 0"


def test_a_rank_never_gets_a_cpu_that_it_may_not_use(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/system.slice/job")
    machine.write("sys/fs/cgroup/system.slice/job/cpuset.cpus.effective", "2-9")
    choice = topology.choose_cpus(NEAR, ranks=1, needed=2, allowed=range(2, 10), root=machine.root)
    assert choice.cpus == {2, 3, 8, 9}


@pytest.mark.parametrize(
    ("allowed", "ranks", "needed", "reason"),
    [
        (range(3), 4, 1, "the launcher has bound it to CPUs 0-2"),
        (range(16), 4, 5, "8 CPUs next to GPU 0000:1a:00.0 are fewer than resources.cpus_per_gpu = 5"),
    ],
)
def test_a_rank_is_left_alone_if_binding_it_would_do_harm(
    machine: Machine, allowed: range, ranks: int, needed: int, reason: str
) -> None:
    choice = topology.choose_cpus(NEAR, ranks, needed, allowed, machine.root)
    assert not choice.cpus
    assert choice.reason.startswith(reason)


def test_a_rank_whose_cpus_are_all_near_or_all_far_is_left_alone(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/")
    machine.write("sys/fs/cgroup/cpuset.cpus.effective", "0-3")
    near = topology.choose_cpus(NEAR, 1, 1, range(4), machine.root)
    far = topology.choose_cpus(FAR, 1, 1, range(4), machine.root)
    assert (near.cpus, near.reason) == (frozenset(), f"all CPUs that it may use are next to GPU {NEAR}")
    assert (far.cpus, far.reason) == (frozenset(), f"none of its CPUs is next to GPU {FAR}")


def test_a_kernel_that_knows_no_nodes_binds_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.gpu(f"pci0000:15/{NEAR}", -1)
    assert not topology.choose_cpus(NEAR, 1, 1, range(16), machine.root).cpus
    assert not topology.choose_cpus("0000:ff:00.0", 1, 1, range(16), machine.root).cpus


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("4:cpuset,cpu:/slurm/job_7\n1:memory:/other", "cpuset/slurm/job_7/cpuset.effective_cpus"),
        ("0::/kubepods/pod/inner", "kubepods/cpuset.cpus.effective"),  # the inner ones have no such file
    ],
)
def test_the_cpus_of_a_job_are_those_of_its_cgroup(machine: Machine, line: str, file: str) -> None:
    machine.write("proc/self/cgroup", line)
    machine.write(f"sys/fs/cgroup/{file}", "4-7")
    assert topology.cpus_of_this_job(machine.root) == {4, 5, 6, 7}


def test_the_adapters_behind_the_same_switch_are_the_closest(machine: Machine) -> None:
    machine.adapter("mlx5_0", "pci0000:15/0000:15:01.0/0000:1c:00.0", 0)
    machine.adapter("mlx5_1", "pci0000:15/0000:15:02.0/0000:1d:00.0", 0)
    machine.adapter("mlx5_2", "pci0000:95/0000:95:01.0/0000:9c:00.0", 1)
    machine.adapter("eth0", "pci0000:15/0000:15:01.0/0000:1e:00.0", 0, kind="net")
    assert [(found.name, found.closeness) for found in topology.closest_adapters(NEAR, machine.root)] == [
        ("mlx5_0", "behind the same PCI switch")
    ]
    assert [found.name for found in topology.closest_adapters(FAR, machine.root)] == ["mlx5_2"]


def test_without_rdma_the_closest_network_interfaces_are_named(machine: Machine) -> None:
    for name in ("eth0", "eth1"):
        machine.adapter(name, f"pci0000:16/0000:16:00.{name[-1]}", 0, kind="net")
    (machine.root / "sys/class/net/lo").mkdir()
    found = topology.closest_adapters(NEAR, machine.root)
    assert [(each.name, each.closeness) for each in found] == [
        ("eth0", "at the same NUMA node"),
        ("eth1", "at the same NUMA node"),
    ]
    assert {each.closeness for each in topology.closest_adapters(FAR, machine.root)} == {
        "at another NUMA node"
    }


@pytest.fixture
def whole_affinity() -> Iterator[set[int]]:
    """CPUs of the tests' process, which has them again afterwards."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def one_gpu(folder: Path, cpus: set[int], near: set[int]) -> Machine:
    machine = Machine(folder)
    machine.write("sys/devices/system/cpu/online", ",".join(map(str, sorted(cpus))))
    machine.gpu(f"pci0000:15/{NEAR}", 0)
    machine.write(f"sys/devices/pci0000:15/{NEAR}/local_cpulist", ",".join(map(str, near)))
    return machine


@pytest.mark.parametrize("keys", [{}, {"bind_cpus": False}, {"device": "cpu"}], ids=str)
def test_a_rank_is_bound_unless_the_job_says_no_or_means_the_cpu(
    keys: dict[str, Any],
    whole_affinity: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if len(whole_affinity) < 2:
        pytest.skip("this machine gives the tests one CPU")
    near = {min(whole_affinity)}
    machine = one_gpu(tmp_path, whole_affinity, near)
    monkeypatch.setattr(nvml, "visible_gpus", lambda _env: [NEAR])
    job = tiny_job(resources={"cpus_per_gpu": 1, **keys})
    caplog.set_level(logging.INFO)
    with subprocess.Popen(["sleep", "60"]) as server:
        cpu_binding.bind_cpus(job, World(0, 1, 0, 1, "n1", "test"), {}, [server.pid], machine.root)
        bound = os.sched_getaffinity(server.pid)
        server.kill()
    assert os.sched_getaffinity(0) == bound == (whole_affinity if keys else near)
    assert ("bound to CPUs" in caplog.text) == (not keys)


class NVMLError(Exception):
    pass


BUSES = (b"00000000:1A:00.0", b"00000000:9A:00.0", b"0001A000:03:00.0")
ADDRESSES = ("0000:1a:00.0", "0000:9a:00.0", "1a000:03:00.0")
UUIDS = ("GPU-a", "GPU-b", "GPU-c")


def stand_in(*names: str) -> SimpleNamespace:
    """Stand-in for pynvml on a machine with GPUs of these names; a handle is a number."""

    def by_uuid(uuid: bytes) -> int:
        if uuid.decode() not in UUIDS[: len(names)]:
            raise NVMLError
        return UUIDS.index(uuid.decode())

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetName=lambda handle: names[handle],
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=BUSES[handle]),
    )


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ({}, [0, 1, 2]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-unknown"}, []),
    ],
    ids=str,
)
def test_gpus_come_in_the_order_in_which_cuda_numbers_them(
    env: dict[str, str], shown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in("H100", "H100", "H100"))
    assert nvml.visible_gpus(env) == [ADDRESSES[index] for index in shown]


def test_the_order_of_several_kinds_is_known_only_if_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in("A100", "H100"))
    assert nvml.visible_gpus({}) == []
    assert nvml.visible_gpus({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == list(ADDRESSES[:2])


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in("H100", "H100"))
    assert nvml.pci_address("b") == ADDRESSES[1]
    assert nvml.pci_address("unknown") is None
