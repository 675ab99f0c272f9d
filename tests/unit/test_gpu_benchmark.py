"""`make bench-gpu`: what it reckons with, and that it says clearly when there is no GPU."""

import json

import pytest
from click.testing import CliRunner

from benchmarks import gpu as benchmark
from benchmarks.gpu_cases import CASES, largest_batch
from trainer.config.gpus import GIB, gpu_named

TURNS = [
    (
        {"step_s": ours, "cpu_s": ours / 4, "peak_bytes": 2 * GIB},
        {"step_s": theirs, "cpu_s": theirs, "peak_bytes": 3 * GIB},
    )
    for ours, theirs in ((0.1, 0.2), (0.2, 0.2), (0.1, 0.11))
]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA L20", "L20"),
        ("NVIDIA A800-SXM4-80GB", "A800-80GB"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA GH200 480GB", None),
        ("Null GPU", None),
    ],
)
def test_only_gpus_of_the_table_have_a_peak(name: str, row: str | None) -> None:
    found = gpu_named(name)
    assert (found and found.name) == row


def test_a_summary_has_the_median_of_the_pairs_and_the_share_of_the_peak() -> None:
    case = CASES["B-32"]
    result = benchmark.summary(case, 1000, TURNS, "NVIDIA H100 80GB HBM3")
    assert (result["speed"], result["host"]) == pytest.approx((1.1, 0.25 / 1.1))
    assert (result["ours_samples_s"], result["theirs_samples_s"]) == pytest.approx((10_000, 5_000))
    assert result["ours_mfu"] == pytest.approx(10_000 * case.flops / 989e12)
    assert (result["ours_peak_gib"], result["theirs_peak_gib"]) == (2, 3)
    assert benchmark.summary(case, 1000, TURNS, "Null GPU")["ours_mfu"] is None


def test_a_small_gpu_takes_fewer_samples() -> None:
    assert largest_batch(CASES["B-32"], 80 * GIB) == 1024
    small = largest_batch(CASES["L-14"], 24 * GIB)
    assert 0 < small < 256
    assert small % 8 == 0
    with pytest.raises(ValueError, match=r"ViT-L-14 fits no GPU of 4.0 GiB"):
        largest_batch(CASES["L-14"], 4 * GIB)


def test_without_a_gpu_it_says_so_and_ends_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_probe", lambda: None)
    result = CliRunner().invoke(benchmark.main, [])
    assert result.exit_code == 0
    first, last = result.stdout.strip().splitlines()
    assert first == "torch sees no GPU on this machine: the benchmark of the step was not run"
    assert json.loads(last) == {"benchmark": "gpu", "skipped": "torch sees no GPU"}
