"""What `clipship check` reckons of a GPU's memory, of a step's time, and of collectives on many GPUs."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_line import TINY, Table, check, joined, problems
from tests.support.jobs import RESNET, tiny_job
from trainer.comm.backends import BACKENDS
from trainer.comm.shard_degree import shard_degree
from trainer.config import Job, Model
from trainer.config.batch_plan import BatchPlan, plan
from trainer.config.fabric_rates import FABRIC_RATES
from trainer.config.loader import dump_job
from trainer.errors import InputError
from trainer.estimate import scaling
from trainer.estimate.architecture import Architecture, architecture
from trainer.estimate.scaling import collectives, scaled_step
from trainer.estimate.step_speed import step_speed, text_forward_share
from trainer.run.job_limits import limits_of_job

H100: dict[str, Any] = {"gpus_per_node": 1, "gpu": "H100"}
H100_ROW: Any = tiny_job(resources=H100).resources.known_gpu


def of_gpus(name: str = "ViT-B-32", batch: int = 1024, **sections: Any) -> Table:
    """A job on one H100 of a cluster, if the sections do not say another."""
    base = joined(
        TINY, model={"name": name, "precision": "bf16"}, optim={"global_batch_size": batch}, slurm={}
    )
    resources = {**H100, **sections.pop("resources", {})}
    return joined(base, resources=resources, **sections)


def shape_of(model: str, **keys: Any) -> Architecture:
    shape = architecture(Model(name=model, **keys))
    assert shape is not None
    return shape


def memory_gib(table: Table) -> float:
    return float(check(table)["gpu_bytes"]) / 2**30


def test_rates_that_were_measured_give_the_estimate_of_a_data_sheet() -> None:
    rates = {"memory_gib": H100_ROW.memory_gib, "tflops": 0.79 * 989, "bandwidth_gb_s": 0.9 * 3350}
    by_rates = check(of_gpus(resources={"gpu": None, "gpu_rates": rates}))["rows"]
    named = check(of_gpus())["rows"]
    for topic in ("device", "memory", "estimate"):
        assert [text.replace("own GPU", "H100") for text in by_rates[topic]] == named[topic]
    [problem] = check(of_gpus(resources={"gpu_rates": rates}))["problems"]
    assert "remove gpu or gpu_rates" in problem


def test_parameters_of_known_models() -> None:
    """In millions."""
    known = {"ViT-B-32": 151.277, "ViT-bigG-14": 2539.567, "ViT-B-16-SigLIP": 203.156}
    found = {name: shape_of(name).parameters / 1e6 for name in known}
    assert found == pytest.approx(known, abs=0.001)


@pytest.mark.parametrize("name", ["RN50", "EVA02-B-16", "roberta-ViT-B-32", "coca_ViT-B-32", "hf-hub:a/b"])
def test_models_whose_config_does_not_say_their_size_have_no_estimates_and_check_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = {"loss": "coca"} if "coca" in name else {}
    table = of_gpus(name, optim=loss, resources={"gpus_per_node": 8})
    found = check(table)
    says = f"not known: the config of {name} does not say its size (docs/performance.md)"
    if name == "roberta-ViT-B-32":
        says = "not known: what the activations of the text tower roberta-base take is not estimated"
    [memory] = found["rows"]["memory"]
    assert memory.startswith(says)
    estimates = ("gpu_bytes", "samples_per_s", "hours", "step_s", "efficiency")
    assert [found[key] for key in estimates] == [None] * 5
    assert not {"estimate", "scaling"} & found["rows"].keys()
    monkeypatch.setitem(sys.modules, "open_clip", None)
    assert "memory" not in check(table)["rows"]


TEACHER = {"teacher": "ViT-L-14", "teacher_pretrained": "openai"}
BIG = {"grad_checkpointing": True}
SPLIT = {"gpus_per_node": 8}


@pytest.mark.parametrize(
    ("name", "batch", "model", "fsdp", "gib"),
    [
        ("ViT-B-32", 1024, {}, None, 34.02),
        ("ViT-bigG-14", 8 * 16, BIG, {}, 5.7),
        ("ViT-bigG-14", 8 * 64, BIG, {}, 8.2),
        ("ViT-H-14", 8 * 16, {}, {"param_dtype": "fp32"}, 9.74),
        ("ViT-H-14", 8 * 4, {}, {"reshard_after_forward": False}, 4.97),
    ],
)
def test_a_step_takes_the_memory_that_the_allocator_gave_out(
    name: str, batch: int, model: dict[str, Any], fsdp: dict[str, Any] | None, gib: float
) -> None:
    split = {} if fsdp is None else {"comm": {"backend": "fsdp", "fsdp": fsdp}, "resources": SPLIT}
    found = memory_gib(of_gpus(name, batch, model=model, **split))
    assert found == pytest.approx(gib, rel=0.05 if split else 0.03)


def test_auto_takes_equal_micro_batches_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = {"max_batch_size_per_gpu": "auto"}
    table = of_gpus("ViT-L-14", 32_768, optim=auto, resources={"nodes": 8, "gpus_per_node": 8})
    chosen = check(table)
    assert chosen["accumulation"] > 1
    assert not [text for text in chosen["warnings"] if "too much for" in text]
    assert "(max_batch_size_per_gpu = " in chosen["rows"]["batch"][0]
    unnamed = joined(table, resources={"gpu": None})
    assert check(unnamed)["accumulation"] == 1, "nothing limits it before the start"
    monkeypatch.setitem(sys.modules, "open_clip", None)
    assert "the ranks choose by the memory of their GPUs" in check(table)["rows"]["batch"][0]


@pytest.mark.parametrize(
    ("model", "sections", "said"),
    [
        (RESNET, {}, f'"auto": the config of {RESNET} does not say how much memory it takes'),
        (RESNET, {"resources": {"device": "cpu", "gpu": None, "gpus_per_node": None}}, ""),
        ("ViT-B-32", {"model": TEACHER}, "does not know what model.teacher takes: give a number"),
        (
            "ViT-bigG-14",
            {"resources": {"gpu": "RTX-4090"}},
            "not even one sample of ViT-bigG-14 fits a GPU of",
        ),
    ],
)
def test_auto_is_refused_where_nothing_fits_and_where_the_arithmetic_cannot_tell(
    model: str, sections: dict[str, Any], said: str
) -> None:
    found = check(of_gpus(model, 16, **joined({"optim": {"max_batch_size_per_gpu": "auto"}}, **sections)))
    assert said in "\n".join(found.get("problems", ()))
    assert found["ok"] is not bool(said)


def test_a_step_that_does_not_fit_is_told_with_what_would() -> None:
    texts = check(of_gpus("ViT-L-14", 512, resources={"gpu": "RTX-4090"}))["warnings"]
    (warning,) = (text for text in texts if "too much for" in text)
    assert "a step of 512 samples takes about 115." in warning
    assert "RTX-4090 with 23.5 GiB: set optim.max_batch_size_per_gpu = " in warning
    assert "or model.grad_checkpointing = true (then up to " in warning
    assert " and comm.backend = " in warning
    single = check(of_gpus("ViT-L-14", 512, model={"precision": "fp32"}, resources={"gpu": "RTX-4090"}))
    assert any('model.precision = "bf16" (then' in text for text in single["warnings"])


# Collectives


seconds_of = partial(scaling.seconds_of, per_node=8)
NDR, ETHERNET = FABRIC_RATES["NDR"], FABRIC_RATES["ETH-100"]
NODES = {"nodes": 128, "gpus_per_node": 8, "gpu": "H100"}
EIGHT = BatchPlan(8, 800, 100, 100, 1)
Found = dict[tuple[str, str], Any]


def found_of(world: int = 8, plan: BatchPlan | None = None, **sections: Any) -> Found:
    """Collectives of a step of ViT-L-14 by kind and place."""
    job = tiny_job(
        **joined({"config": "ViT-L-14", "model": {"precision": "bf16"}, "resources": NODES}, **sections)
    )
    plan = plan or BatchPlan(world, 100 * world, 100, 100, 1)
    found = collectives(shape_of("ViT-L-14"), job, plan, job.comm.backend, 1)
    return {(one.what, one.place): one for one in found}


def test_the_loss_gives_what_performance_md_says() -> None:
    own, everybody = 100 * 768 * 4, 800 * 768 * 4
    shape = shape_of("ViT-L-14")
    data = {"format": "auto", "train": ("a.tar",)}
    for judged in (False, True):
        sections: dict[str, Any] = {"model": {"targets": ("f",)}, "data": data} if judged else {}
        job = tiny_job(config="ViT-L-14", **sections)
        found = collectives(shape, job, EIGHT, "torch", 25 * 2**20)
        last = ("reduce_scatter", 2 * everybody) if judged else ("all_gather", 2 * 100 * 4)
        of_loss = [(one.what, one.nbytes) for one in found if one.place in ("text", "loss")]
        assert of_loss == [("all_gather", own), ("all_gather", own), last]
        assert found[-1].nbytes == 4 * shape.parameters
    siglip = found_of(optim={"loss": "siglip"})
    assert siglip["all_gather", "loss"].nbytes == own
    assert siglip["reduce_scatter", "loss"].nbytes == everybody


def test_parts_of_the_model_travel_in_half_precision_and_gradients_in_float32() -> None:
    parameters = shape_of("ViT-L-14").parameters
    gather, scatter = ("all_gather", "backward"), ("reduce_scatter", "backward")

    def of_fsdp(world: int = 8, **fsdp: Any) -> Found:
        return found_of(world, comm={"backend": "fsdp", "fsdp": fsdp})

    plain = of_fsdp()
    assert plain["all_gather", "forward"].nbytes == plain[gather].nbytes == 2 * parameters / 8
    assert plain[scatter].nbytes == 4 * parameters
    assert of_fsdp(param_dtype="fp32")[gather].nbytes == 2 * plain[gather].nbytes
    assert of_fsdp(reduce_dtype="bf16")[scatter].nbytes == plain[scatter].nbytes / 2
    assert gather not in of_fsdp(reshard_after_forward=False)
    passes = found_of(plan=BatchPlan(8, 800, 100, 50, 2), comm={"backend": "fsdp"})
    assert passes["all_gather", "forward"].nbytes == 4 * plain["all_gather", "forward"].nbytes
    assert passes[scatter].nbytes == 2 * plain[scatter].nbytes
    # Several nodes of eight ranks hold a copy each: gathered within it, its rows reduced between nodes.
    copies = of_fsdp(64, shard_degree="node")
    assert of_fsdp(64) == copies
    among = copies["all_reduce", "backward"]
    for one, ranks, stride, nbytes in (
        (copies["all_gather", "forward"], 8, 1, 2 * parameters / 8),
        (copies[scatter], 8, 1, 4 * parameters),
        (among, 8, 8, 4 * parameters / 8),
    ):
        assert (one.ranks, one.stride, one.nbytes) == (ranks, stride, nbytes)
    first = copies["all_gather", "forward"]
    hops_s = first.times * 5e-6
    assert seconds_of(first, 64, NDR) == pytest.approx(7 / 8 * 2 * parameters / (0.9 * 450e9) + hops_s)
    # The eight GPUs of a node reduce eight parts at once, over the links that they share.
    reduced = replace(among, times=1)
    assert seconds_of(reduced, 64, NDR) == pytest.approx(2 * 7 / 8 * 4 * parameters / (0.9 * 400e9), rel=0.01)
    whole = of_fsdp(64, shard_degree=1)
    assert {place: one.nbytes for place, one in whole.items() if place[1] in ("forward", "backward")} == {
        ("all_reduce", "backward"): 4 * parameters
    }


def test_compressed_gradients_are_half_as_many_bytes_and_one_rank_sends_none() -> None:
    parameters = shape_of("ViT-L-14").parameters
    for backend, form, share in (("torch", "none", 1), ("torch", "bf16", 0.5), ("horovod", "fp16", 0.5)):
        comm: dict[str, Any] = {"backend": backend, backend: {"compression": form}}
        assert found_of(comm=comm)["all_reduce", "backward"].nbytes == share * 4 * parameters
        assert found_of(1, comm=comm) == {}


def test_an_all_reduce_is_bound_by_the_network_beyond_one_node() -> None:
    one = replace(found_of()["all_reduce", "backward"], nbytes=1e9, times=1)
    assert seconds_of(one, 8, NDR) == pytest.approx(2 * 7 / 8 * 1e9 / (0.9 * 450e9) + 5e-6)
    assert seconds_of(one, 16, ETHERNET) == pytest.approx(2 * 1 / 2 * 1e9 / (0.9 * 12.5e9) + 3 * 30e-6)
    assert seconds_of(one, 9, ETHERNET) == seconds_of(one, 16, ETHERNET), "a ninth GPU is on a second node"


@pytest.mark.parametrize(
    ("comm", "row", "efficiency"),
    [
        ({"backend": "torch"}, "torch", 0.985),
        ({"backend": "fsdp"}, "fsdp", 0.984),
        ({"backend": "fsdp", "fsdp": {"shard_degree": "world"}}, 'fsdp, `shard_degree = "world"`', 0.981),
        ({"backend": "horovod"}, "horovod", 0.983),
    ],
)
def test_l_14_keeps_as_much_of_its_speed_on_1024_gpus_as_performance_md_says(
    comm: dict[str, Any], row: str, efficiency: float
) -> None:
    found = check(of_gpus("ViT-L-14", 1024 * 256, comm=comm, resources=NODES))["efficiency"]
    assert found == pytest.approx(efficiency, abs=0.0005)
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")
    (cells,) = (line.split(" | ") for line in page.splitlines() if line.startswith(f"| {row} | "))
    assert float(cells[4].rstrip(" |")) == efficiency


def test_horovod_waits_for_half_a_cycle_and_a_round_which_is_long_over_gloo() -> None:
    """MPI's round is a tree of nodes, Gloo's goes twice round all ranks, each hop over TCP."""

    def asked_s(ranks: int, nodes: int, hop_s: float = 5e-6, **comm: Any) -> float:
        job = tiny_job(comm={"backend": "horovod", **comm})
        return BACKENDS["horovod"].negotiation_s(job, ranks, nodes, hop_s)

    assert asked_s(1024, 128) == pytest.approx(0.25e-3 / 2 + 15 * 5e-6)
    assert asked_s(1024, 128, horovod={"cycle_ms": 2.0}) == pytest.approx(2e-3 / 2 + 15 * 5e-6)
    assert asked_s(1024, 128, horovod={"cycle_ms": 0.01}) == pytest.approx(1.5 * 15 * 5e-6)
    assert asked_s(1024, 128, 40e-6) == pytest.approx(1.5 * 15 * 40e-6)
    assert asked_s(8, 1) == pytest.approx(1e-3 / 2 + 14 * 30e-6), "on one host there is no MPI"
    assert asked_s(8, 1, launcher="mpirun") == pytest.approx(0.25e-3 / 2 + 5e-6)
    assert asked_s(1024, 128, launcher="clipship") == pytest.approx(1.5 * 2046 * 30e-6)
    assert BACKENDS["torch"].negotiation_s(tiny_job(), 1024, 128, 5e-6) == 0
    alone = tiny_job(comm={"backend": "horovod", "horovod": {"fusion_mb": 0.0}})
    assert BACKENDS["horovod"].reduced_mb(alone.comm) == 1.0, "gradients that travel alone are not ever more"


def test_a_step_waits_for_what_no_computation_hides() -> None:
    shape = shape_of("ViT-L-14")

    def scaled(gpus: int = 1024, passes: int = 1, fabric: str = "NDR", kernels: str = "fast") -> Any:
        model = {"precision": "bf16", "kernels": kernels}
        job: Job = tiny_job(config="ViT-L-14", model=model, comm={"launcher": "mpirun"}, resources=NODES)
        plan = BatchPlan(gpus, gpus * 256, 256, 256 // passes, passes)
        return scaled_step(shape, job, plan, H100_ROW, FABRIC_RATES[fabric])

    assert scaled(1).efficiency == 1
    fast, plain = scaled(), scaled(kernels="plain")
    # The loss has its products in TF32 unless kernels are plain.
    assert plain.loss_s == pytest.approx(fast.loss_s * 494 / 67)
    # A faster step waits as long for the network, and so for a larger share of its time.
    assert fast.exposed_s - plain.exposed_s == pytest.approx((plain.loss_s - fast.loss_s) / 6)
    assert fast.step_s < plain.step_s
    assert fast.exposed_s / fast.step_s > plain.exposed_s / plain.step_s
    # The backward pass of the last micro-batch hides less of the gradients.
    waits = [scaled(passes=passes, fabric="ETH-100").exposed_s for passes in (1, 2, 8)]
    assert waits[0] < waits[-1]
    assert waits == sorted(waits)
    # On a slow network the gather of images takes longer than the text tower beside it.
    gather = replace(found_of()["all_gather", "text"], nbytes=256 * shape.embed_dim * 4)
    alone, job = BatchPlan(1, 256, 256, 256, 1), tiny_job(config="ViT-L-14", model={"precision": "bf16"})
    speed = step_speed(shape, job, alone, H100_ROW).samples_s
    text_s = 256 / speed * text_forward_share(shape, job, alone)
    assert seconds_of(gather, 1024, NDR) < text_s < seconds_of(gather, 1024, ETHERNET)
    assert waits[0] > seconds_of(gather, 1024, ETHERNET) - text_s
    for passes, beside in ((1, True), (2, False)):
        found = found_of(plan=BatchPlan(8, 800, 100, 100 // passes, passes))
        assert (("all_gather", "text") in found) is beside


# How a global batch and a model are divided among ranks, and with how many a job can go on.


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 100))
def test_micro_batches_are_equal_and_as_large_as_the_limit_lets_them(
    ranks: int, per_rank: int, limit: int
) -> None:
    job = tiny_job(optim={"global_batch_size": ranks * per_rank, "max_batch_size_per_gpu": limit})
    found = plan(job, ranks)
    assert found.micro_batch_size * found.accumulation * found.world_size == ranks * per_rank
    assert 1 <= found.micro_batch_size <= limit
    coarser = [k for k in range(1, found.accumulation) if per_rank % k == 0]
    assert all(per_rank // k > limit for k in coarser)


GRAPHS = {"cuda_graphs": True}
STATIC = {"torch": {"static_graph": True}}
LIMITED = {"global_batch_size": 16, "max_batch_size_per_gpu": 4}
OF_24 = {"optim": {"global_batch_size": 24}}
THREE_NODES = {"nodes": 3, "gpus_per_node": 4}
THREE = {"max_restarts": 3, "min_nodes": 3}


@pytest.mark.parametrize(
    ("ranks", "sections", "said"),
    [
        (8, {"optim": {"global_batch_size": 100}}, "100 cannot be shared equally by 8 ranks: use 96 or 104"),
        (8, {"optim": {"global_batch_size": 100}}, "one of these numbers of ranks: 2, 4, 5, 10"),
        (2, {"comm": STATIC, "optim": LIMITED}, "with 2 ranks each step has 2 passes: leave static_graph"),
        (2, {"model": GRAPHS}, ""),
        (2, {"model": GRAPHS, "optim": LIMITED}, "but with 2 ranks each step has 2: leave cuda_graphs out"),
        (4, {"comm": {"backend": "fsdp", "find_unused_parameters": True}}, "unused_parameters = true is not"),
        (4, {"comm": {"backend": "fsdp", "fsdp": {"shard_degree": 3}}}, "degree = 3 does not divide 4 ranks"),
        (4, {"comm": {"backend": "fsdp"}, "model": GRAPHS}, "cuda_graphs = true is not possible with comm.b"),
        (None, {"recovery": {"spare_nodes": 2}}, "spare_nodes = 2 needs max_restarts above 0"),
        (None, {"recovery": {"min_nodes": 1}}, "min_nodes = 1 needs max_restarts above 0"),
        (None, OF_24 | {"recovery": {"max_restarts": 3, "min_nodes": 1}}, ""),
        (
            None,
            OF_24 | {"recovery": {"max_restarts": 3, "min_nodes": 4}},
            "min_nodes = 4 is above resources.n",
        ),
        (
            None,
            {"optim": {"global_batch_size": 12}, "recovery": {"max_restarts": 3, "min_nodes": 2}},
            "min_nodes = 2: 8 ranks cannot share optim.global_batch_size = 12 equally: use 1 or 3",
        ),
        (
            None,
            OF_24 | {"recovery": THREE, "stage": [{"optim": {"global_batch_size": 64}}]},
            "12 ranks cannot share optim.global_batch_size = 64 of stage 2 equally: use 1 or 2",
        ),
        (
            None,
            OF_24 | {"recovery": THREE, "comm": {"backend": "fsdp", "fsdp": {"shard_degree": 8}}},
            "12 ranks cannot be cut into groups of comm.fsdp.shard_degree = 8: use 2",
        ),
        (
            None,
            {"recovery": THREE, "comm": STATIC, "optim": {**LIMITED, "global_batch_size": 96}},
            "12 ranks cannot train (comm.torch.static_graph = true needs a reduction",
        ),
    ],
)
def test_a_batch_and_a_model_that_ranks_cannot_share_are_refused(
    ranks: int | None, sections: dict[str, Any], said: str
) -> None:
    resources = {"gpus_per_node": ranks} if ranks else THREE_NODES
    found = problems(resources=resources, slurm={}, **sections)
    assert said in found
    assert bool(said) == bool(found)


@pytest.mark.parametrize(
    ("batch_size", "sections", "sizes", "even"),
    [
        (24, {"optim": {"max_batch_size_per_gpu": 6}}, [1, 2, 3, 4, 6, 8, 12, 24], False),
        (24, {"optim": {"max_batch_size_per_gpu": 6}, "comm": STATIC}, [4, 6, 8, 12, 24], False),
        (96, {"stage": ({"optim": {"global_batch_size": 64}},)}, [1, 2, 4, 8, 16, 32], False),
        (24, {"comm": {"backend": "fsdp", "fsdp": {"shard_degree": 4}}}, [1, 4, 8, 12, 24], False),
        (6, {"comm": {"backend": "torch", "fsdp": {"shard_degree": 4}}}, [1, 2, 3, 6], False),
        (4, {"comm": {"backend": "fsdp", "fsdp": {"shard_degree": "node"}}}, [1, 2, 4], True),
    ],
)
def test_a_supervisor_is_told_with_how_many_ranks_a_run_can_go_on(
    tmp_path: Path, batch_size: int, sections: dict[str, Any], sizes: list[int], even: bool
) -> None:
    optim = {"global_batch_size": batch_size, **sections.pop("optim", {})}
    (tmp_path / "job.toml").write_text(dump_job(tiny_job(optim=optim, **sections)))
    found = limits_of_job([str(tmp_path / "job.toml")])
    assert (found["world_sizes"], found["even_nodes"]) == (sizes, even)


@pytest.mark.parametrize(
    ("setting", "nodes", "expected"),
    [
        ("world", "aabb", 4),
        ("node", "aabb", 2),
        ("node", "abcd", 1),
        (4, "aabb", 4),
        ("auto", "a" * 8 + "b" * 8, 8),
        ("auto", "a" * 8 + "b" * 7, 15),
        ("node", "aab", "the same number of ranks on each node"),
        ("node", "abab", "one node after the other, but the 4 ranks are on a, b, a, b"),
        (3, "aabb", "comm.fsdp.shard_degree = 3 does not divide 4 ranks"),
    ],
)
def test_a_model_is_split_among_consecutive_ranks(setting: Any, nodes: str, expected: int | str) -> None:
    if isinstance(expected, int):
        assert shard_degree(setting, list(nodes)) == expected
        return
    with pytest.raises(InputError, match=expected):
        shard_degree(setting, list(nodes))
