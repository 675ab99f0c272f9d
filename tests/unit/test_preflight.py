"""Conclusions that the preflight draws from measurements, and its view of the network."""

import json
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.jobs import tiny_job
from trainer.errors import MachineError
from trainer.preflight import host_probe, network_probe
from trainer.preflight.check import PreflightReport, check_again, has_passed
from trainer.preflight.findings import find_problems
from trainer.preflight.measurements import Measurements, Needs
from trainer.preflight.table import lines
from trainer.run.layout import Run
from trainer.train.prepare import _report_findings

NEEDS = Needs(shm_bytes=1 << 30, open_files=1024, checkpoint_bytes=1 << 30, checkpoints=4)
GPU: dict[str, Any] = {
    "name": "H100",
    "free_bytes": 79 << 30,
    "total_bytes": 80 << 30,
    "uncorrected_errors": 0,
    "slowed_by": (),
    "other_processes": 0,
}
PLACE: dict[str, Any] = {
    "gpu": "0000:1a:00.0",
    "numa_node": 0,
    "cpus": "0-31",
    "near": True,
    "apart": False,
    "adapters": ("mlx5_0", "mlx5_1"),
    "closeness": "behind the same PCI switch",
}
FRESH_S = 3600


def timing(size: int, seconds: float) -> dict[str, Any]:
    return {"bytes": size, "seconds": seconds}


def rdma(*devices: str, opened: bool = False, refused_by: str = "") -> dict[str, Any]:
    return {"devices": devices, "opened": opened, "refused_by": refused_by}


def readings(nodes: int = 4, every: dict[str, Any] | None = None, **changed: Any) -> list[Measurements]:
    """One rank a node, all well but for `every`; `changed` is that of the last."""
    own = asdict(Measurements(0, 0, "", 2 << 30, 4096, 100 << 30, 1000.0))
    tables = [
        own
        | {"rank": rank, "node": f"n{rank}", "gpu": GPU, "timings": {"all_reduce": timing(1 << 20, 0.001)}}
        | {"pairs": {f"n{rank ^ 1}": timing(1 << 24, 0.01)}}
        | (every or {})
        for rank in range(nodes)
    ]
    return [Measurements.from_table(table) for table in (*tables[:-1], tables[-1] | changed)]


def texts(measurements: Sequence[Measurements], fabric: str | None = None, check: str = "") -> list[str]:
    """What is found; with `check`, only about that."""
    found = find_problems(measurements, replace(NEEDS, fabric=fabric))
    return [
        f"{finding.severity} {finding.check}: {finding.text}"
        for finding in found
        if check in ("", finding.check)
    ]


SLOW = timing(1 << 24, 0.1)
CARD, GPU_3 = "mlx5_0 400 Gb/s", "rank 3 on n3, H100"
TCP = "NCCL uses TCP instead of the node's"
FAR = PLACE | {"cpus": "32-63", "near": False, "apart": True}


@pytest.mark.parametrize(
    ("changed", "expected", "blamed"),
    [
        ({"wrong": ("all_reduce: 3 values",)}, "collectives: rank 3 on n3: all_reduce: 3 values", True),
        ({"shm_bytes": 64 << 20}, "shared memory: n3: 64 MiB of /dev/shm are free", False),
        ({"open_files": 256}, "open files: n3: 256 open files are allowed, but a rank may need 1024", False),
        ({"clock_s": 990.0}, "clock: n3: its clock is 10.0 s behind", False),
        ({"pairs": {"n2": SLOW}}, "link: n3: 0.168 GB/s to its best partner, but the median is 1.68", True),
        ({"gpu": GPU | {"uncorrected_errors": 2}}, f"ECC: {GPU_3}: 2 uncorrected memory errors", True),
        ({"gpu": GPU | {"slowed_by": ("heat",)}}, f"GPU clocks: {GPU_3}: slowed down by heat", False),
        ({"gpu": GPU | {"other_processes": 1}}, f"GPU use: {GPU_3}: 1 other process uses it", False),
        ({"gpu": GPU | {"free_bytes": 40 << 30}}, f"GPU memory: {GPU_3}: only 40.0 GiB of 80.0 GiB", False),
        ({"rdma": rdma(CARD)}, f"RDMA: n3: {TCP} {CARD}; a container needs", True),
        ({"rdma": rdma(CARD, refused_by="NCCL_NET=a")}, f"RDMA: n3: {TCP} {CARD}; NCCL_NET=a makes", False),
        ({"placement": FAR}, "CPUs: rank 3 on n3: no CPU next to the GPU; rank 3 has CPUs 32-63", False),
    ],
)
def test_the_odd_node_is_named_and_blamed_if_its_hardware_is_the_reason(
    changed: dict[str, Any], expected: str, blamed: bool
) -> None:
    (finding,) = find_problems(readings(**changed), NEEDS)
    assert finding.severity == ("error" if "wrong" in changed else "warning")
    assert f"{finding.check}: {finding.text}".startswith(expected)
    assert finding.node == ("n3" if blamed else "")


USED, IDLE = rdma(CARD, opened=True), rdma(CARD)


def test_an_open_clip_that_was_not_tried_is_named_once() -> None:
    (text,) = texts(readings(every={"open_clip": "4.0.1"}))
    assert "open_clip_torch 4.0.1 is none of the releases" in text


def test_nodes_that_all_fell_back_to_tcp_are_named_with_the_devices_that_they_have() -> None:
    devices = [f"mlx5_{number} 400 Gb/s" for number in range(8)]
    (text,) = texts(readings(every={"rdma": rdma(*devices)}))
    assert text.startswith(
        "warning RDMA: n0, n1, n2, n3: NCCL uses TCP instead of the node's mlx5_0 400 Gb/s, "
        "mlx5_1 400 Gb/s, mlx5_2 400 Gb/s and 5 more; a container needs /dev/infiniband"
    )
    assert len(texts(readings(every={"rdma": IDLE}), "ib")) == 1, "and the fabric is not named again"


def _device(
    sysfs: Path, name: str, rate: str, *, state: str = "4: ACTIVE", layer: str = "InfiniBand"
) -> None:
    """As the kernel shows an RDMA device with one port."""
    port = sysfs / name / "ports" / "1"
    port.mkdir(parents=True)
    for file, text in (("rate", rate), ("state", state), ("link_layer", layer)):
        (port / file).write_text(f"{text}\n")


def _files(folder: Path, *targets: str) -> Path:
    """As /proc shows the files that a process has open."""
    folder.mkdir()
    for number, target in enumerate(targets):
        (folder / str(number)).symlink_to(target)
    return folder


def test_active_rdma_devices_are_found_and_whether_one_is_open(tmp_path: Path) -> None:
    _device(tmp_path, "mlx5_0", "400 Gb/sec (4X NDR)")
    _device(tmp_path, "mlx5_1", "200 Gb/sec (4X HDR)", layer="Ethernet")
    _device(tmp_path, "rdmap16s27", "100 Gb/sec (4X EDR)", layer="Unspecified")  # EFA
    _device(tmp_path, "mlx5_2", "400 Gb/sec (4X NDR)", state="1: DOWN")
    _device(tmp_path, "bnxt_re0", "25 Gb/sec (1X EDR)", layer="Ethernet")  # the node's ordinary adapter
    (tmp_path / "broken/ports/1").mkdir(parents=True)
    shut = _files(tmp_path / "a", "/dev/null")
    opened = _files(tmp_path / "b", "/dev/null", "/dev/infiniband/uverbs3")
    devices = ("mlx5_0 400 Gb/s", "mlx5_1 200 Gb/s", "rdmap16s27 100 Gb/s")
    for env, files, is_open, refused_by in (
        ({}, shut, False, ""),
        ({"NCCL_IB_DISABLE": "0"}, opened, True, ""),
        ({"NCCL_IB_DISABLE": "1"}, shut, False, "NCCL_IB_DISABLE=1"),
        ({"NCCL_NET": "Socket"}, shut, False, "NCCL_NET=Socket"),
    ):
        found = host_probe.rdma(env, tmp_path, files)
        assert found is not None
        assert asdict(found) == rdma(*devices, opened=is_open, refused_by=refused_by)
    assert host_probe.rdma({}, tmp_path / "none", shut) is None


def test_a_fabric_that_no_node_sees_is_named() -> None:
    (text,) = texts(readings(), "roce", "fabric")
    expected = 'n0, n1, n2, n3: resources.fabric = "roce", but no active adapter is visible'
    assert text.startswith(f"warning fabric: {expected}")
    assert not texts(readings(), "ethernet", "fabric")
    assert not texts(readings(every={"node": "n0", "pairs": {}}), "roce", "fabric")


@pytest.mark.parametrize(
    ("fabric", "adapter", "gb_s", "carries"),
    [
        ("ib", 400, 1.68, 50.0),
        ("ib", 50, 1.68, None),
        # whose adapters say no speed: the slowest row of Ethernet has 10 Gb/s, and an adapter of TCPXO 200
        ("ethernet", None, 0.1, 1.25),
        ("ethernet", None, 0.4, None),
        ("tcpxo", None, 5.0, 25.0),
        ("tcpxo", None, 7.0, None),
    ],
)
def test_a_fabric_on_which_every_node_is_slow_is_named(
    fabric: str, adapter: int | None, gb_s: float, carries: float | None
) -> None:
    """No node is odd, and a quarter of one adapter is enough."""
    pairs = {"n0": timing(1 << 24, (1 << 24) / (gb_s * 1e9))}
    used = rdma(f"mlx5_0 {adapter} Gb/s", "mlx5_1 25 Gb/s", opened=True) if adapter else None
    found = texts(readings(every={"pairs": pairs, "rdma": used}), fabric, "fabric")
    if carries is None:
        assert not found
    else:
        assert f"reaches {gb_s:.3g} GB/s, and one adapter alone carries {carries:.3g} GB/s" in found[0]


@pytest.mark.parametrize("fabric", ["ib", None])
def test_nodes_that_may_lock_too_little_memory_for_rdma_are_named(fabric: str | None) -> None:
    def found(locked: int | None, used: dict[str, Any] | None) -> list[str]:
        return texts(readings(every={"rdma": used, "locked_bytes": locked}), fabric, "locked memory")

    used = rdma("mlx5_0 10 Gb/s", opened=True)
    (text,) = found(8 << 20, used)
    assert "n0, n1, n2, n3: a rank may lock 8 MiB of memory" in text
    assert not found(None, used) + found(4 << 30, used)
    assert bool(found(8 << 20, None)) is (fabric == "ib")


def test_root_with_the_capability_may_lock_memory_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr("resource.getrlimit", lambda _: (8 << 20, 8 << 20))
    status.write_text("Name:\tpython\nCapEff:\t0000000000004000\n")
    assert host_probe.locked_bytes(status) is None
    status.write_text("Name:\tpython\nCapEff:\t0000000000003fff\n")
    assert host_probe.locked_bytes(status) == 8 << 20
    assert host_probe.locked_bytes(tmp_path / "none") == 8 << 20


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"timings": {"host to device": timing(1 << 26, 0.05)}}, "host to device: rank 3 on n3: "),
        ({"tflops": 500.0}, "GPU products: rank 3 on n3: 500 TFLOP/s of products, but the median is 700 "),
    ],
)
def test_a_slow_gpu_or_copy_to_it_is_named_against_the_others(changed: dict[str, Any], expected: str) -> None:
    well = {"timings": {"host to device": timing(1 << 26, 0.01)}, "tflops": 700.0}
    (text,) = texts(readings(every=well, **changed))
    assert text.startswith(f"warning {expected}")


@pytest.mark.parametrize(
    ("name", "told"), [("NVIDIA GeForce RTX 3090", True), ("NVIDIA H100 80GB HBM3", False)]
)
def test_rates_of_a_gpu_without_a_row_are_told_as_a_job_takes_them(name: str, told: bool) -> None:
    gpu = GPU | {"name": name, "free_bytes": 24 << 30, "total_bytes": 24 << 30}
    copy = {"within the GPU": timing(2 << 28, 0.00062)}
    text = "\n".join(lines(readings(1, gpu=gpu, tflops=71.4, timings=copy), [], [], "fine"))
    given = "gpu_rates = { memory_gib = 24.0, tflops = 71, bandwidth_gb_s = 866 }"
    assert "GPU products   at least 71 TFLOP/s in bf16 (rank 0 on n0)" in text
    assert (given in text) == told
    assert tiny_job(resources=tomllib.loads(given)).resources.known_gpu is not None


def test_a_small_disk_is_a_matter_of_the_run_folder_alone() -> None:
    (text,) = texts(readings(every={"disk_bytes": 1 << 20}))
    room = "1 MiB are free in the run folder's file system, but 4 checkpoints need about 4.0 GiB"
    assert text.startswith(f"warning disk: n0: {room}")


def test_partner_of_a_slow_node_is_not_blamed() -> None:
    measurements = readings(pairs={"n2": SLOW, "n1": SLOW})
    partner = asdict(measurements[2]) | {"pairs": {"n3": SLOW, "n0": timing(1 << 24, 0.01)}}
    measurements[2] = Measurements.from_table(partner)
    (text,) = texts(measurements)
    assert text.startswith("warning link: n3")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9))
def test_every_round_pairs_ranks_mutually_and_across_places(slots: list[int]) -> None:
    places = [(f"n{node}", local) for node, count in enumerate(slots) for local in range(count)]
    rounds = network_probe.rounds(places)
    units = len(slots) if len(slots) > 1 else slots[0]
    assert len(rounds) == (units - 1).bit_length()
    met = set()
    for partners in rounds:
        for rank, partner in enumerate(partners):
            assert partners[partner] == rank
            if partner != rank:
                assert network_probe.unit(places, rank) != network_probe.unit(places, partner)
                met.add(network_probe.unit(places, rank))
    firsts = {network_probe.unit(places, rank) for rank, (_, local) in enumerate(places) if local == 0}
    assert units == 1 or met >= firsts


def test_a_restart_finds_a_collective_that_has_become_wrong_and_names_its_values(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert network_probe.wrong_collectives(alone) == ()

    def zeros_in_the_middle(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[300:400] = 0  # as GPUs do whose peer access is broken
        return tensor

    monkeypatch.setattr(alone, "all_reduce", zeros_in_the_middle)
    said = "wrong values: rank 0 on here: all_reduce: 100 of 65536 values are wrong, value 300 is 0 instead"
    with pytest.raises(MachineError, match=said):
        check_again(alone)


@pytest.mark.parametrize(("in_time", "repeats"), [(0, 1), (2, 3), (99, network_probe.REPEATS)])
def test_measuring_is_repeated_until_the_time_is_up(alone: Any, in_time: int, repeats: int) -> None:
    answers, runs = chain([False] * in_time, repeat(True)), []
    network_probe.timing(alone, 8, lambda: runs.append(1), lambda: next(answers))
    assert len(runs) == 1 + repeats  # the first one sets up connections
    answers = chain([False], repeat(True))
    assert list(network_probe.time_collectives(alone, 1024, 1024, lambda: next(answers))) == ["latency"]


def test_table_names_the_slowest_and_says_what_was_left_out() -> None:
    measurements = readings(timings={"all_reduce": timing(1 << 20, 0.002)})
    for number, used in enumerate((USED, IDLE)):
        measurements[number] = Measurements.from_table(asdict(measurements[number]) | {"rdma": used})
    findings = find_problems(readings(clock_s=990.0), NEEDS)
    shown = list(lines(measurements, findings, ("pairs",), "0 errors, 1 warning in 2.0 s"))
    assert shown[0] == "world          4 ranks on 4 nodes: n0, n1, n2, n3"
    assert "all_reduce     0.524 GB/s: 1 MiB in 2 ms (slowest: rank 3 on n3)" in shown
    assert "not measured   pairs: time ran out (health.preflight_s)" in shown
    assert "RDMA           1 of 2 ranks use an RDMA device of their node" in shown
    assert shown[-2].startswith("warning        clock: n3: its clock is 10.0 s behind")
    assert shown[-1] == "result         0 errors, 1 warning in 2.0 s"


def test_table_shows_where_the_ranks_of_a_node_are() -> None:
    loose = {"gpu": "0000:9a:00.0", "numa_node": None, "cpus": "0-63", "near": False, "adapters": ()}
    measurements = readings(2, {"placement": PLACE, "node": "n0"}, placement=PLACE | loose)
    shown = [line.split(maxsplit=1) for line in lines(measurements, [], (), "0 errors")]
    at = next(number for number, line in enumerate(shown) if line[0] == "CPUs")
    assert shown[at][1] == "1 of 2 ranks on CPUs next to the GPU alone"
    assert " ".join(shown[at + 1]) == (
        "rank 0 on n0: GPU 0000:1a:00.0, NUMA node 0, CPUs 0-31, mlx5_0, mlx5_1 behind the same PCI switch"
    )
    assert " ".join(shown[at + 2]) == "rank 1 on n0: GPU 0000:9a:00.0, unknown NUMA node, CPUs 0-63"
    assert shown[at + 3][0] == "result"


@pytest.mark.parametrize(
    ("generation", "measured", "passed"),
    [
        (2, {"here": 60, "there": 60}, True),
        (2, {"there": 60}, False),
        (2, {"here": FRESH_S + 60, "there": 60}, False),
        (2, {"here": 60, "there": FRESH_S + 60}, True),
        (2, None, False),
        (1, {"here": 60}, False),
    ],
)
def test_a_restart_measures_no_node_again_that_has_passed_lately(
    tmp_path: Path,
    alone: Any,
    monkeypatch: pytest.MonkeyPatch,
    generation: int,
    measured: dict[str, float] | None,
    passed: bool,
) -> None:
    """`measured` are the seconds since each node's measurement."""
    figures = tmp_path / "preflight.json"
    if measured is not None:
        rows = [{"node": node, "clock_s": time.time() - ago} for node, ago in measured.items()]
        figures.write_text(json.dumps({"measurements": rows}))
    monkeypatch.setattr(alone, "world", replace(alone.world, generation=generation))
    assert has_passed(alone, figures) == passed
    assert check_again(alone).endswith("; 1 node passed before")


def report(measurements: Sequence[Measurements]) -> PreflightReport:
    return PreflightReport(tuple(measurements), tuple(find_problems(measurements, NEEDS)), (), 1.5)


@pytest.mark.parametrize(
    ("nodes", "wrong", "unfit"), [(4, {"n1"}, "n1"), (4, {"n1", "n2"}, None), (1, {"n0"}, None)]
)
def test_errors_of_one_node_among_several_name_it_as_unfit(
    nodes: int, wrong: set[str], unfit: str | None
) -> None:
    """With two ranks on each node, all of which get wrong values on some nodes."""
    measurements = [
        replace(own, rank=2 * number + slot, wrong=("all_reduce: 3 values",) if own.node in wrong else ())
        for number, own in enumerate(readings(nodes))
        for slot in range(2)
    ]
    found = report(measurements)
    with pytest.raises(MachineError, match="all_reduce: 3 values") as raised:
        found.raise_errors()
    assert getattr(raised.value, "node", None) == unfit
    text = found.as_json()
    assert "\n" not in text
    shown = json.loads(text)
    assert (shown["ranks"], shown["errors"]) == (2 * nodes, 1)
    assert shown["measurements"][-1]["node"] == f"n{nodes - 1}"


def test_a_run_condemns_the_node_that_a_warning_blames(
    tmp_path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor of rank 0 reads it, and the node is left out from the next restart on."""
    monkeypatch.setenv("CLIPSHIP_RANK_DIR", str(tmp_path))
    found = report(readings(pairs={"n2": SLOW}, clock_s=990.0))
    assert [finding.node for finding in found.findings] != ["n3"]
    _report_findings(found, Run(tmp_path), alone)
    told = json.loads((tmp_path / "condemned.json").read_text())
    assert told == {"n3": "preflight: n3: 0.168 GB/s to its best partner, but the median is 1.68 GB/s"}
