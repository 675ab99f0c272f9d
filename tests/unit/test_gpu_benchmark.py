"""`make bench-gpu`: what it reckons with, and that it says clearly when there is no GPU."""

import json
import sys

import pytest
from click.testing import CliRunner

from benchmarks import gpu as benchmark
from benchmarks.gpu_cases import Skipped
from benchmarks.gpu_changes import CHANGES
from trainer.config.gpus import gpu_named


def test_only_gpus_of_the_table_have_a_peak() -> None:
    for name, row in {
        "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "NVIDIA GB200": "GB200", "NVIDIA H20": "H20",
        "NVIDIA A100-SXM4-40GB": "A100-40GB", "NVIDIA A100-SXM4-80GB": "A100-80GB", "NVIDIA L20": "L20",
        "NVIDIA GeForce RTX 4090": "RTX-4090", "NVIDIA A800-SXM4-80GB": "A800-80GB", "NVIDIA H800": "H800",
        "NVIDIA B300 SXM6 AC": "B300", "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada",
        "NVIDIA H100 PCIe": None, "NVIDIA GH200 480GB": None, "Null GPU": None,
    }.items():  # fmt: skip
        found = gpu_named(name)
        assert (found and found.name) == row


def test_a_torch_without_varlen_attn_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(Skipped, match="varlen_attn is not in this torch"):
        CHANGES["varlen"]()


def test_without_a_gpu_it_says_so_and_ends_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "probe", lambda: None)
    result = CliRunner().invoke(benchmark.main, [])
    assert result.exit_code == 0
    first, last = result.stdout.strip().splitlines()
    assert first == "torch sees no GPU on this machine: the benchmark of the step was not run"
    assert json.loads(last) == {"benchmark": "gpu", "skipped": "torch sees no GPU"}
