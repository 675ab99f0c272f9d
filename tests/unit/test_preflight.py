"""Conclusions that the preflight draws from measurements, and its view of the network."""

import json
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.jobs import tiny_job
from trainer.comm.connect import connect
from trainer.comm.protocol import Comm
from trainer.config.resources import Resources
from trainer.errors import MachineError, UnfitNode
from trainer.preflight import host_probe, network_probe
from trainer.preflight.check import FRESH_S, PreflightReport, check_again, has_passed
from trainer.preflight.findings import find_problems
from trainer.preflight.measurements import Finding, Gpu, Measurements, Needs, Placement, Rdma, Timing
from trainer.preflight.table import lines
from trainer.run.exit_record import RANK_DIR
from trainer.run.layout import Run
from trainer.train.prepare import _report_findings
from trainer.world.condemned import condemned
from trainer.world.launchers import detect

NEEDS = Needs(shm_bytes=1 << 30, open_files=1024, checkpoint_bytes=1 << 30, checkpoints=4)
GPU = Gpu(
    "H100", free_bytes=79 << 30, total_bytes=80 << 30, uncorrected_errors=0, slowed_by=(), other_processes=0
)


def _readings(nodes: int = 4, **changed: Any) -> list[Measurements]:
    """One rank a node, all well; `changed` is that of the last."""
    fast = {"all_reduce": Timing(1 << 20, 0.001)}
    measurements = [
        Measurements(
            n,
            0,
            f"n{n}",
            2 << 30,
            4096,
            100 << 30,
            1000.0,
            timings=fast,
            pairs={f"n{n ^ 1}": Timing(1 << 24, 0.01)},
            gpu=GPU,
        )
        for n in range(nodes)
    ]
    return [*measurements[:-1], replace(measurements[-1], **changed)]


def _texts(measurements: list[Measurements]) -> list[str]:
    return [
        f"{finding.severity} {finding.check}: {finding.text}"
        for finding in find_problems(measurements, NEEDS)
    ]


def test_nothing_is_found_where_all_is_well() -> None:
    assert _texts(_readings()) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"wrong": ("all_reduce: 3 values",)}, "error collectives: rank 3 on n3: all_reduce: 3 values"),
        ({"shm_bytes": 64 << 20}, "warning shared memory: n3: 64 MiB of /dev/shm are free"),
        ({"open_files": 256}, "warning open files: n3: 256 open files are allowed, but a rank may need 1024"),
        ({"clock_s": 990.0}, "warning clock: n3: its clock is 10.0 s behind"),
        (
            {"pairs": {"n2": Timing(1 << 24, 0.1)}},
            "warning link: n3: 0.168 GB/s to its best partner, but the median is 1.68 GB/s",
        ),
        (
            {"gpu": replace(GPU, uncorrected_errors=2)},
            "warning ECC: rank 3 on n3, H100: 2 uncorrected memory errors",
        ),
        (
            {"gpu": replace(GPU, slowed_by=("power brake",))},
            "warning GPU clocks: rank 3 on n3, H100: slowed down by power brake",
        ),
        (
            {"gpu": replace(GPU, other_processes=1)},
            "warning GPU use: rank 3 on n3, H100: 1 other process uses it",
        ),
        (
            {"gpu": replace(GPU, free_bytes=40 << 30)},
            "warning GPU memory: rank 3 on n3, H100: only 40.0 GiB of 80.0 GiB are free",
        ),
    ],
)
def test_the_odd_node_is_named(changed: dict[str, Any], expected: str) -> None:
    (text,) = _texts(_readings(**changed))
    assert text.startswith(expected)


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
    shut, opened = (
        _files(tmp_path / "a", "/dev/null"),
        _files(tmp_path / "b", "/dev/null", "/dev/infiniband/uverbs3"),
    )
    devices = ("mlx5_0 400 Gb/s", "mlx5_1 200 Gb/s", "rdmap16s27 100 Gb/s")
    assert host_probe.rdma({}, tmp_path, shut) == Rdma(devices, opened=False)
    assert host_probe.rdma({"NCCL_IB_DISABLE": "0"}, tmp_path, opened) == Rdma(devices, opened=True)
    assert host_probe.rdma({"NCCL_IB_DISABLE": "1"}, tmp_path, shut) == Rdma(
        devices, False, "NCCL_IB_DISABLE=1"
    )
    assert host_probe.rdma({"NCCL_NET": "Socket"}, tmp_path, shut) == Rdma(devices, False, "NCCL_NET=Socket")
    assert host_probe.rdma({}, tmp_path / "none", shut) is None


def test_nodes_that_all_fell_back_to_tcp_are_named_with_the_devices_that_they_have() -> None:
    idle = Rdma(tuple(f"mlx5_{number} 400 Gb/s" for number in range(8)), opened=False)
    (text,) = _texts([replace(r, rdma=idle) for r in _readings()])
    assert text.startswith(
        "warning RDMA: n0, n1, n2, n3: NCCL uses TCP instead of the node's mlx5_0 400 Gb/s, "
        "mlx5_1 400 Gb/s, mlx5_2 400 Gb/s "
        "and 5 more; a container needs /dev/infiniband"
    )
    refused = replace(idle, refused_by="NCCL_IB_DISABLE=1")
    (text,) = _texts([replace(r, rdma=refused) for r in _readings()])
    assert text.endswith("and 5 more; NCCL_IB_DISABLE=1 makes it do so: remove that setting")
    (text,) = _texts(_readings(rdma=idle))
    assert text.startswith("warning RDMA: n3: NCCL uses TCP")


def _fabric_texts(measurements: list[Measurements], fabric: str | None) -> list[str]:
    found = find_problems(measurements, replace(NEEDS, fabric=fabric))
    return [finding.text for finding in found if finding.check == "fabric"]


@pytest.mark.parametrize("fabric", ["ib", "roce", "efa"])
def test_a_fabric_that_no_node_sees_is_named(fabric: str) -> None:
    (text,) = _fabric_texts(_readings(), fabric)
    assert text.startswith(f'n0, n1, n2, n3: resources.fabric = "{fabric}", but no active adapter is visible')
    assert not _fabric_texts(_readings(), None)
    assert not _fabric_texts(_readings(), "ethernet")
    assert not _fabric_texts([replace(r, node="n0", pairs={}) for r in _readings()], fabric)


@pytest.mark.parametrize(("gb", "slow"), [(400, True), (100, True), (50, False), (40, False)])
def test_a_fabric_on_which_every_node_is_slow_is_named(gb: int, slow: bool) -> None:
    """All nodes reach 1.68 GB/s, so that none is odd."""
    used = Rdma((f"mlx5_0 {gb} Gb/s", "mlx5_1 25 Gb/s"), opened=True)
    texts = _fabric_texts([replace(r, rdma=used) for r in _readings()], "ib")
    assert len(texts) == int(slow)
    if slow:
        assert f"reaches 1.68 GB/s, and one adapter alone carries {gb / 8:.3g} GB/s" in texts[0]
    assert not _texts([replace(r, rdma=used) for r in _readings()])


@pytest.mark.parametrize(
    ("fabric", "gb_s", "slow"),
    [("ethernet", 0.1, True), ("ethernet", 0.4, False), ("tcpxo", 5.0, True), ("tcpxo", 7.0, False)],
)
def test_a_fabric_whose_adapters_say_no_speed_is_compared_with_the_table_of_rates(
    fabric: str, gb_s: float, slow: bool
) -> None:
    """The slowest row of Ethernet has 10 Gb/s, and an adapter of TCPXO 200 Gb/s; a quarter is enough."""
    pairs = {"n0": Timing(1 << 24, (1 << 24) / (gb_s * 1e9))}
    texts = _fabric_texts([replace(r, pairs=pairs) for r in _readings()], fabric)
    assert [f"reaches {gb_s:.3g} GB/s, and one adapter alone carries" in text for text in texts] == [
        True
    ] * slow


@pytest.mark.parametrize("fabric", ["ib", "ethernet", None])
def test_nodes_that_may_lock_too_little_memory_for_rdma_are_named(fabric: str | None) -> None:
    used = Rdma(("mlx5_0 10 Gb/s",), opened=True)

    def texts(locked: int | None, rdma: Rdma | None) -> list[str]:
        measured = [replace(r, rdma=rdma, locked_bytes=locked) for r in _readings()]
        found = find_problems(measured, replace(NEEDS, fabric=fabric))
        return [finding.text for finding in found if finding.check == "locked memory"]

    (text,) = texts(8 << 20, used)
    assert text.startswith("n0, n1, n2, n3: a rank may lock 8 MiB of memory")
    assert not texts(None, used)
    assert not texts(4 << 30, used)
    assert bool(texts(8 << 20, None)) is (fabric == "ib")


def test_root_with_the_capability_may_lock_memory_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr("trainer.preflight.host_probe.resource.getrlimit", lambda _: (8 << 20, 8 << 20))
    status.write_text("Name:\tpython\nCapEff:\t0000000000004000\n")
    assert host_probe.locked_bytes(status) is None
    status.write_text("Name:\tpython\nCapEff:\t0000000000003fff\n")
    assert host_probe.locked_bytes(status) == 8 << 20
    assert host_probe.locked_bytes(tmp_path / "none") == 8 << 20


def test_adapters_that_are_not_opened_are_named_once() -> None:
    idle = Rdma(("mlx5_0 400 Gb/s",), opened=False)
    assert not _fabric_texts([replace(r, rdma=idle) for r in _readings()], "ib")
    assert len(find_problems([replace(r, rdma=idle) for r in _readings()], replace(NEEDS, fabric="ib"))) == 1


def test_nothing_is_said_of_rdma_that_is_used_or_not_needed() -> None:
    used = Rdma(("mlx5_0 400 Gb/s",), opened=True)
    assert _texts([replace(r, rdma=used) for r in _readings()]) == []
    one_node = [replace(r, node="n0", pairs={}, rdma=replace(used, opened=False)) for r in _readings()]
    assert _texts(one_node) == []


def test_slow_copy_to_a_gpu_is_named_against_the_others() -> None:
    measurements = [
        replace(r, timings={"host to device": Timing(1 << 26, 0.01 if r.rank != 1 else 0.05)})
        for r in _readings()
    ]
    (text,) = _texts(measurements)
    assert text.startswith("warning host to device: rank 1 on n1: ")


def test_a_slow_gpu_is_named_against_the_others() -> None:
    measurements = [replace(r, tflops=500.0 if r.rank == 1 else 700.0) for r in _readings()]
    (text,) = _texts(measurements)
    assert text.startswith(
        "warning GPU products: rank 1 on n1: 500 TFLOP/s of products, but the median is 700 "
    )


@pytest.mark.parametrize(
    ("name", "told"), [("NVIDIA GeForce RTX 3090", True), ("NVIDIA H100 80GB HBM3", False)]
)
def test_rates_of_a_gpu_without_a_row_are_told_as_a_job_takes_them(name: str, told: bool) -> None:
    gpu = Gpu(name, 24 * 2**30, 24 * 2**30, 0, (), 0)
    copy = {"within the GPU": Timing(2 << 28, 0.00062)}
    (own, *_) = _readings()
    text = "\n".join(lines([replace(own, gpu=gpu, tflops=71.4, timings=copy)], [], [], "fine"))
    given = "gpu_rates = { memory_gib = 24.0, tflops = 71, bandwidth_gb_s = 866 }"
    assert "GPU products   at least 71 TFLOP/s in bf16 (rank 0 on n0)" in text
    assert (given in text) == told
    assert Resources.model_validate(tomllib.loads(given)).known_gpu is not None


def test_a_small_disk_is_a_matter_of_the_run_folder_alone() -> None:
    measurements = [replace(r, disk_bytes=1 << 20) for r in _readings()]
    (text,) = _texts(measurements)
    assert text.startswith(
        "warning disk: n0: 1 MiB are free in the run folder's file system, "
        "but 4 checkpoints need about 4.0 GiB"
    )


def test_partner_of_a_slow_node_is_not_blamed() -> None:
    slow = Timing(1 << 24, 0.1)
    measurements = _readings(pairs={"n2": slow, "n1": slow})
    measurements[2] = replace(measurements[2], pairs={"n3": slow, "n0": Timing(1 << 24, 0.01)})
    (text,) = _texts(measurements)
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
    firsts = {
        network_probe.unit(places, rank)
        for rank, (_, local) in enumerate(places)
        if local == 0 or len(slots) == 1
    }
    assert units == 1 or met >= firsts


@pytest.fixture
def alone() -> Iterator[Comm]:
    comm = connect(tiny_job(), detect({}, "here"), {})
    yield comm
    comm.close()


def test_collectives_of_one_rank_are_right(alone: Comm) -> None:
    assert network_probe.wrong_collectives(alone) == ()


def test_a_collective_with_a_wrong_result_is_named_with_it(
    alone: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros_in_the_middle(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[300:400] = 0  # as GPUs do whose peer access is broken
        return tensor

    monkeypatch.setattr(alone, "all_reduce", zeros_in_the_middle)
    (text,) = network_probe.wrong_collectives(alone)
    assert text == "all_reduce: 100 of 65536 values are wrong, value 300 is 0 instead of 49"


def test_measuring_stops_when_the_time_is_up(alone: Comm) -> None:
    answers = chain([False], repeat(True))
    assert list(network_probe.time_collectives(alone, 1024, 1024, lambda: next(answers))) == ["latency"]


@pytest.mark.parametrize(("in_time", "repeats"), [(0, 1), (2, 3), (99, network_probe.REPEATS)])
def test_a_slow_collective_is_repeated_until_the_time_is_up(alone: Comm, in_time: int, repeats: int) -> None:
    answers, runs = chain([False] * in_time, repeat(True)), []
    network_probe.timing(alone, 8, lambda: runs.append(1), lambda: next(answers))
    assert len(runs) == 1 + repeats  # the first one sets up connections


def test_table_names_the_slowest_and_says_what_was_left_out() -> None:
    measurements = _readings(timings={"all_reduce": Timing(1 << 20, 0.002)})
    measurements[:2] = [
        replace(r, rdma=Rdma(("mlx5_0 400 Gb/s",), opened=not r.rank)) for r in measurements[:2]
    ]
    shown = list(
        lines(
            measurements, [Finding("warning", "clock", "n1: off")], ("pairs",), "0 errors, 1 warning in 2.0 s"
        )
    )
    assert shown[0] == "world          4 ranks on 4 nodes: n0, n1, n2, n3"
    assert "all_reduce     0.524 GB/s: 1 MiB in 2 ms (slowest: rank 3 on n3)" in shown
    assert "not measured   pairs: time ran out (health.preflight_s)" in shown
    assert "RDMA           1 of 2 ranks use an RDMA device of their node" in shown
    assert "warning        clock: n1: off" in shown
    assert shown[-1] == "result         0 errors, 1 warning in 2.0 s"


def test_table_shows_where_the_ranks_of_a_node_are() -> None:
    place = Placement(
        "0000:1a:00.0", 0, "0-31", True, False, ("mlx5_0", "mlx5_1"), "behind the same PCI switch"
    )
    loose = replace(place, gpu="0000:9a:00.0", numa_node=None, cpus="0-63", near=False, adapters=())
    measurements = [
        replace(r, placement=loose if r.rank == 1 else place, node=f"n{r.rank // 2}") for r in _readings()
    ]
    shown = [line.split(maxsplit=1) for line in lines(measurements, [], (), "0 errors")]
    at = next(number for number, line in enumerate(shown) if line[0] == "CPUs")
    assert shown[at][1] == "3 of 4 ranks on CPUs next to the GPU alone"
    assert " ".join(shown[at + 1]) == (
        "rank 0 on n0: GPU 0000:1a:00.0, NUMA node 0, CPUs 0-31, mlx5_0, mlx5_1 behind the same PCI switch"
    )
    assert " ".join(shown[at + 2]) == "rank 1 on n0: GPU 0000:9a:00.0, unknown NUMA node, CPUs 0-63"
    assert shown[at + 3][0] == "result"
    assert [Measurements.from_table(asdict(r)) for r in measurements] == measurements


def test_a_rank_whose_launcher_bound_it_to_the_other_socket_is_named() -> None:
    near = Placement("0000:1a:00.0", 0, "0-31", True, False, (), "")
    far = replace(near, cpus="32-63", near=False, apart=True)
    readings = [replace(r, placement=far if r.rank == 2 else near) for r in _readings()]
    (finding,) = find_problems(readings, NEEDS)
    assert finding.severity == "warning"
    assert "rank 2 on n2: no CPU next to the GPU; rank 2 has CPUs 32-63" in finding.text


def test_report_is_one_line_of_json() -> None:
    text = PreflightReport(tuple(_readings()), (Finding("error", "disk", "n0: full"),), (), 1.5).as_json()
    assert "\n" not in text
    found = json.loads(text)
    assert (found["ranks"], found["errors"], found["measurements"][3]["node"]) == (4, 1, "n3")


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
    tmp_path: Path, generation: int, measured: dict[str, float] | None, passed: bool
) -> None:
    """`measured` are the seconds since each node's measurement."""
    figures = tmp_path / "preflight.json"
    if measured is not None:
        rows = [{"node": node, "clock_s": time.time() - ago} for node, ago in measured.items()]
        figures.write_text(json.dumps({"measurements": rows}))
    world = replace(detect({}, "here"), generation=generation)
    comm = connect(tiny_job(), world, {})
    try:
        assert has_passed(comm, figures) == passed
        assert check_again(comm).endswith("; 1 node passed before")
    finally:
        comm.close()


def _report(nodes: int, wrong: set[str]) -> PreflightReport:
    """Report of two ranks on each node, where all ranks of some nodes get wrong values."""
    measurements = [
        replace(own, rank=2 * number + slot, wrong=("all_reduce: 3 values",) if own.node in wrong else ())
        for number, own in enumerate(_readings(nodes))
        for slot in range(2)
    ]
    return PreflightReport(tuple(measurements), tuple(find_problems(measurements, NEEDS)), (), 1.5)


@pytest.mark.parametrize(
    ("nodes", "wrong", "unfit"), [(4, {"n1"}, "n1"), (4, {"n1", "n2"}, None), (1, {"n0"}, None)]
)
def test_errors_of_one_node_among_several_name_it_as_unfit(
    nodes: int, wrong: set[str], unfit: str | None
) -> None:
    with pytest.raises(MachineError, match="all_reduce: 3 values") as raised:
        _report(nodes, wrong).raise_errors()
    assert (raised.value.node if isinstance(raised.value, UnfitNode) else None) == unfit


@pytest.mark.parametrize(
    ("changed", "node"),
    [
        ({"wrong": ("all_reduce: 3 values",)}, "n3"),
        ({"pairs": {"n2": Timing(1 << 24, 0.1)}}, "n3"),
        ({"gpu": replace(GPU, uncorrected_errors=2)}, "n3"),
        ({"rdma": Rdma(("mlx5_0 400 Gb/s",), opened=False)}, "n3"),
        ({"rdma": Rdma(("mlx5_0 400 Gb/s",), opened=False, refused_by="NCCL_IB_DISABLE=1")}, ""),
        ({"clock_s": 990.0}, ""),
        ({"gpu": replace(GPU, other_processes=1)}, ""),
    ],
)
def test_only_a_finding_about_hardware_blames_the_node(changed: dict[str, Any], node: str) -> None:
    (finding,) = find_problems(_readings(**changed), NEEDS)
    assert finding.node == node


def test_a_run_condemns_the_node_that_a_warning_blames(
    tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor of rank 0 reads it, and the node is left out from the next restart on."""
    monkeypatch.setenv(RANK_DIR, str(tmp_path))
    findings = (
        Finding("warning", "link", "n3: 0.1 GB/s to its best partner; check its cable", "n3"),
        Finding("warning", "clock", "n2: its clock is 10.0 s behind; check that the node runs NTP"),
    )
    _report_findings(PreflightReport((), findings, (), 1.0), Run(tmp_path), alone)
    assert condemned(tmp_path) == {"n3": "preflight: n3: 0.1 GB/s to its best partner"}


def test_a_restart_finds_a_collective_that_has_become_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = connect(tiny_job(), detect({}, "here"), {})
    try:
        monkeypatch.setattr(comm, "all_reduce", lambda tensor: tensor + 1)
        with pytest.raises(MachineError, match="wrong values: rank 0 on here: all_reduce: "):
            check_again(comm)
    finally:
        comm.close()
