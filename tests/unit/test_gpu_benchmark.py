"""`make bench-gpu`: what it reckons with, and that it says clearly when there is no GPU."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.nn import functional as F

from benchmarks import gpu as benchmark
from benchmarks.gpu_cases import CASES, OPEN_CLIP, Skipped, largest_batch
from benchmarks.gpu_changes import CHANGES
from trainer.config.gpus import GIB, gpu_named
from trainer.model import fused_block


def measured(step_s: float, cpu_s: float, peak_gib: int) -> dict[str, float]:
    """Returns the measurements of one side in a turn."""
    memory = {"peak_bytes": peak_gib * GIB, "taken_bytes": 2 * peak_gib * GIB}
    return {"step_s": step_s, "cpu_s": cpu_s, "first_s": 20.0, **memory}


TURNS = [
    {"ours": measured(ours, ours / 4, 2), "theirs": measured(theirs, theirs, 3)}
    for ours, theirs in ((0.1, 0.2), (0.2, 0.2), (0.1, 0.11))
]


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


def test_a_summary_has_the_median_of_the_pairs_and_the_share_of_the_peak() -> None:
    case = CASES["B-32"]
    result = benchmark.summary(case, 1000, TURNS, "NVIDIA H100 80GB HBM3")
    assert (result["speed"], result["host"]) == pytest.approx((1.1, 0.25 / 1.1))
    assert (result["ours_samples_s"], result["theirs_samples_s"]) == pytest.approx((10_000, 5_000))
    assert result["ours_mfu"] == pytest.approx(10_000 * case.flops / 989e12)
    assert (result["ours_peak_gib"], result["theirs_peak_gib"]) == (2, 3)
    assert (result["ours_host_ms"], result["ours_first_s"], result["ours_taken_gib"]) == (25, 20, 4)
    assert benchmark.summary(case, 1000, TURNS, "Null GPU")["ours_mfu"] is None


def test_our_side_alone_has_no_speed_beside_another_and_a_case_that_cannot_run_says_why() -> None:
    alone = benchmark.summary(CASES["B-32"], 1000, [{"ours": TURNS[0]["ours"]}], "Null GPU")
    assert alone["ours_samples_s"] == pytest.approx(10_000)
    assert "speed" not in alone
    why = {"skipped": "varlen_attn is not in this torch"}
    assert benchmark.summary(CASES["B-32-captions-varlen"], 1000, [{"ours": why}], "Null GPU") == why


def test_each_case_has_a_job_changes_that_are_known_and_a_case_before_it_to_compare_with() -> None:
    before = {"", OPEN_CLIP}
    for name, case in CASES.items():
        job = case.job(64, 10, ranks=4)
        assert (job.optim.global_batch_size, job.comm.backend) == (256, case.backend or "torch")
        assert case.against in before, name
        assert set(case.changes) <= CHANGES.keys(), name
        before.add(name)


def test_attention_by_varlen_attn_has_the_features_and_gradients_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans, heads = [3, 77, 1, 20], 2
    starts = torch.tensor([0, *spans]).cumsum(0)

    def by_caption(q: Tensor, k: Tensor, v: Tensor, *places: Any, window_size: tuple[int, int]) -> Tensor:
        assert (places[0].tolist(), places[2:], window_size) == (starts.tolist(), (77, 77), (-1, 0))
        parts = [part.transpose(0, 1).split(spans, 1) for part in (q, k, v)]
        captions = zip(*parts, strict=True)
        attended = [F.scaled_dot_product_attention(a, b, c, is_causal=True) for a, b, c in captions]
        return torch.cat(attended, 1).transpose(0, 1)

    def results() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        joint, grad, bias = (
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((1, sum(spans), 48), (1, sum(spans), 16), (48,))
        )
        joint, bias = joint.requires_grad_(), bias.requires_grad_()
        out = fused_block.attention(fused_block.PLAIN, joint, bias, heads, True, starts)
        return [out, *torch.autograd.grad(out, (joint, bias), grad)]

    expected = results()
    monkeypatch.setattr(fused_block, "attention", fused_block.attention)  # put back at the end
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=by_caption))
    CHANGES["varlen"]()
    for found, wanted in zip(results(), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_torch_without_varlen_attn_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(Skipped, match="varlen_attn is not in this torch"):
        CHANGES["varlen"]()


def test_a_small_gpu_takes_fewer_samples() -> None:
    assert largest_batch(CASES["B-32"], 80 * GIB) == 1024
    small = largest_batch(CASES["L-14"], 24 * GIB)
    assert 0 < small < 256
    assert small % 8 == 0
    with pytest.raises(ValueError, match=r"ViT-L-14 fits no GPU of 4.0 GiB"):
        largest_batch(CASES["L-14"], 4 * GIB)


def test_without_a_gpu_it_says_so_and_ends_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "probe", lambda: None)
    result = CliRunner().invoke(benchmark.main, [])
    assert result.exit_code == 0
    first, last = result.stdout.strip().splitlines()
    assert first == "torch sees no GPU on this machine: the benchmark of the step was not run"
    assert json.loads(last) == {"benchmark": "gpu", "skipped": "torch sees no GPU"}
