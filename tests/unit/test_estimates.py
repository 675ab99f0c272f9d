"""What `clipship check` reckons of a GPU's memory, of a step's time, and of collectives on many GPUs."""

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from open_clip.model import _build_vision_tower

from tests.support.command_line import TINY, Table, check, joined
from tests.support.jobs import RESNET, VIT, tiny_job
from trainer.comm.backends import BACKENDS
from trainer.config import Job, Model
from trainer.config.batch_plan import BatchPlan
from trainer.config.fabric_rates import FABRIC_RATES
from trainer.config.gpus import GIB, GPUS, GpuName
from trainer.estimate import scaling
from trainer.estimate.architecture import Architecture, architecture
from trainer.estimate.fit import usable_bytes, with_micro_batch
from trainer.estimate.scaling import Collective, collectives, scaled_step
from trainer.estimate.step_speed import step_speed, text_forward_share, training_flops
from trainer.model.catalog import config_file

H100 = {"gpus_per_node": 1, "gpu": "H100"}


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
    return float(check(table)["gpu_bytes"]) / GIB


def test_the_table_has_the_gpus_that_a_job_may_name() -> None:
    assert tuple(GPUS) == get_args(GpuName)
    for gpu in GPUS.values():
        assert gpu.tflops["bf16"] > gpu.tflops["tf32"] >= gpu.tflops["fp32"]
        assert gpu.memory == int(gpu.memory_gib * GIB)


def test_rates_that_were_measured_give_the_estimate_of_a_data_sheet() -> None:
    rates = {"memory_gib": GPUS["H100"].memory_gib, "tflops": 0.79 * 989, "bandwidth_gb_s": 0.9 * 3350}
    by_rates = check(of_gpus(resources={"gpu": None, "gpu_rates": rates}))["rows"]
    named = check(of_gpus())["rows"]
    for topic in ("device", "memory", "estimate"):
        assert [text.replace("own GPU", "H100") for text in by_rates[topic]] == named[topic]
    [problem] = check(of_gpus(resources={"gpu_rates": rates}))["problems"]
    assert "remove gpu or gpu_rates" in problem


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("ViT-B-32", 151.277),
        ("ViT-L-14", 427.617),
        ("ViT-bigG-14", 2539.567),
        ("ViT-B-16-SigLIP", 203.156),
        ("ViT-SO400M-14-SigLIP", 877.36),
    ],
)
def test_parameters_of_known_models(name: str, millions: float) -> None:
    assert shape_of(name).parameters / 1e6 == pytest.approx(millions, abs=0.001)


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-16-SigLIP"])
def test_tokens_of_a_model_with_patch_dropout_are_those_that_its_blocks_get(name: str) -> None:
    shape = shape_of(name, patch_dropout=0.4)
    config = json.loads(config_file(name).read_text())
    with torch.device("meta"):
        visual = _build_vision_tower(config["embed_dim"], {**config["vision_cfg"], "patch_dropout": 0.4})
        blocks = visual.trunk.blocks if hasattr(visual, "trunk") else visual.transformer.resblocks
        got: list[int] = []
        blocks[0].register_forward_pre_hook(lambda _, given: got.append(given[0].shape[1]))
        visual.train()(torch.zeros(2, 3, *shape.image_size))
    assert got == [shape.image.tokens]
    assert shape.parameters == shape_of(name).parameters


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


def test_several_ranks_keep_gradients_and_those_that_split_the_model_a_part_of_them() -> None:
    def parts(gpus: int, **comm: Any) -> dict[str, float]:
        table = of_gpus("ViT-L-14", 32 * gpus, comm=comm, resources={"gpus_per_node": gpus})
        listed = check(table)["rows"]["memory"][0].partition(": ")[2]
        return {name: float(gib) for name, gib in re.findall(r"([a-z]+) (\d+\.\d)", listed)}

    one, two, split = parts(1), parts(2), parts(8, backend="fsdp")
    parameters = shape_of("ViT-L-14").parameters
    assert two["gradients"] == pytest.approx(4 * parameters / GIB, abs=0.1)
    assert two["gradients"] > one.get("gradients", 0.0)
    assert split["optimizer"] == pytest.approx(two["optimizer"] / 8, abs=0.1)
    assert split.get("gradients", 0.0) <= two["gradients"] / 8 + 0.1
    sizes = [
        check(of_gpus("ViT-H-14", 128, resources=SPLIT, comm={"backend": "fsdp", "fsdp": fsdp}))["gpu_bytes"]
        for fsdp in ({}, {"reduce_dtype": "bf16"})
    ]
    assert sizes[0] - sizes[1] == 2 * 12 * 1280**2, "those of a block wait in half precision"


@pytest.mark.parametrize("model", ["ViT-B-32", "ViT-L-14", "ViT-B-16-SigLIP"])
def test_the_largest_micro_batch_fits_and_one_more_sample_does_not(model: str) -> None:
    def found(samples: int) -> dict[str, Any]:
        return check(of_gpus(model, 4 * samples, resources={"gpu": "L40S", "gpus_per_node": 4}))

    [most] = re.findall(r"up to ([\d,]+) samples fit in one forward pass", found(1)["rows"]["memory"][1])
    samples = int(most.replace(",", ""))
    assert samples > 4
    fits = found(samples)
    assert fits["gpu_bytes"] <= usable_bytes(GPUS["L40S"].memory) < found(samples + 1)["gpu_bytes"]
    for count, told in ((samples, 0), (samples + 1, 1)):
        assert len([text for text in found(count)["warnings"] if "too much for" in text]) == told
    assert usable_bytes(100 * GIB) == 90 * GIB - GIB // 2


def test_auto_takes_equal_micro_batches_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = {"max_batch_size_per_gpu": "auto"}
    table = of_gpus("ViT-L-14", 32_768, optim=auto, resources={"nodes": 8, "gpus_per_node": 8})
    chosen = check(table)
    assert chosen["accumulation"] > 1
    assert chosen["gpu_bytes"] <= usable_bytes(GPUS["H100"].memory)
    assert "(max_batch_size_per_gpu = " in chosen["rows"]["batch"][0]
    unnamed = joined(table, resources={"gpu": None})
    assert check(unnamed)["accumulation"] == 1, "nothing limits it before the start"
    monkeypatch.setitem(sys.modules, "open_clip", None)
    assert "the ranks choose by the memory of their GPUs" in check(table)["rows"]["batch"][0]
    job = tiny_job(optim=auto)
    assert with_micro_batch(job, 64, None).optim.max_batch_size_per_gpu is None


@pytest.mark.parametrize(
    ("model", "sections", "said"),
    [
        (RESNET, {}, f'"auto": the config of {RESNET} does not say how much memory it takes'),
        (RESNET, {"resources": {"device": "cpu", "gpu": None, "gpus_per_node": None}}, ""),
        (
            "ViT-B-32",
            {"model": {"teacher": "ViT-L-14", "teacher_pretrained": "openai"}},
            "does not know what model.teacher takes: give a number",
        ),
        (
            "ViT-bigG-14",
            {"resources": {"gpu": "RTX-4090"}},
            "not even one sample of ViT-bigG-14 fits a GPU of 23.5",
        ),
    ],
)
def test_auto_is_refused_where_nothing_fits_and_where_the_arithmetic_cannot_tell(
    model: str, sections: dict[str, Any], said: str
) -> None:
    found = check(of_gpus(model, 16, **joined({"optim": {"max_batch_size_per_gpu": "auto"}}, **sections)))
    assert said in "\n".join(found.get("problems", ()))
    assert found["ok"] is not bool(said)


def test_check_says_memory_what_fits_and_how_long_it_takes() -> None:
    found = check(of_gpus(batch=8192, optim={"steps": 1000}, resources={"gpus_per_node": 8}))
    memory, fits = found["rows"]["memory"]
    assert memory.startswith("about 34.4 GiB of 79.1 (H100): activations 31.4, optimizer 1.1")
    assert fits.startswith("up to 2,")
    assert fits.endswith("samples fit in one forward pass (optim.max_batch_size_per_gpu)")
    [estimate] = found["rows"]["estimate"]
    assert "samples/s on 8 H100s (MFU 0." in estimate
    assert "GPU-hours at least; from the GPU's peak rates, not measured" in estimate
    assert found["hours"] == pytest.approx(1000 * 8192 / found["samples_per_s"] / 3600)
    unnamed = check(of_gpus(resources={"gpu": None}))["rows"]
    assert unnamed["memory"][0].startswith("about 33.9 GiB on each GPU: activations 31.4")
    assert "estimate" not in unnamed
    cpus = check(of_gpus(resources={"device": "cpu", "gpu": None, "gpus_per_node": None}))["rows"]
    assert not {"memory", "estimate"} & cpus.keys()


def test_a_step_that_does_not_fit_is_told_with_what_would() -> None:
    texts = check(of_gpus("ViT-L-14", 512, resources={"gpu": "RTX-4090"}))["warnings"]
    (warning,) = (text for text in texts if "too much for" in text)
    assert "a step of 512 samples takes about 115." in warning
    assert "RTX-4090 with 23.5 GiB: set optim.max_batch_size_per_gpu = " in warning
    assert "or model.grad_checkpointing = true (then up to " in warning
    assert " and comm.backend = " in warning
    single = check(of_gpus("ViT-L-14", 512, model={"precision": "fp32"}, resources={"gpu": "RTX-4090"}))
    assert any('model.precision = "bf16" (then' in text for text in single["warnings"])


def test_an_estimate_is_below_the_peak_and_follows_the_products() -> None:
    # 14.5 GFLOP for one sample's forward pass; a backward pass has twice as many.
    job = tiny_job(config="ViT-B-32", model={"precision": "bf16"})
    assert training_flops(shape_of("ViT-B-32"), job) == pytest.approx(3 * 14.5e9, rel=0.02)
    for gpu in GPUS.values():
        peak = gpu.tflops["bf16"] * 1e12 / (3 * 14.5e9)
        assert 0 < check(of_gpus(resources={"gpu": gpu.name}))["samples_per_s"] < peak * 1.02
    again = check(of_gpus(model={"grad_checkpointing": True}))
    assert again["samples_per_s"] < check(of_gpus())["samples_per_s"]
    assert again["gpu_bytes"] < check(of_gpus())["gpu_bytes"]


def test_locked_towers_take_no_state_and_no_activations() -> None:
    whole, locked = (check(of_gpus(VIT, 16, model={"lock_image": lock})) for lock in (False, True))
    shape = shape_of(VIT, lock_image=True)
    saved = whole["gpu_bytes"] - locked["gpu_bytes"]
    assert saved > 8 * (shape.parameters - shape.text.parameters)


# Collectives


seconds_of = partial(scaling.seconds_of, per_node=8)
NDR, ETHERNET = FABRIC_RATES["NDR"], FABRIC_RATES["ETH-100"]
NODES = {"nodes": 128, "gpus_per_node": 8, "gpu": "H100"}
EIGHT = BatchPlan(8, 800, 100, 100, 1)
Found = dict[tuple[str, str], Collective]


def found_of(world: int = 8, plan: BatchPlan | None = None, **sections: Any) -> Found:
    """Collectives of a step of ViT-L-14 by kind and place."""
    job = tiny_job(
        **joined({"config": "ViT-L-14", "model": {"precision": "bf16"}, "resources": NODES}, **sections)
    )
    plan = plan or BatchPlan(world, 100 * world, 100, 100, 1)
    return {
        (one.what, one.place): one
        for one in collectives(shape_of("ViT-L-14"), job, plan, job.comm.backend, 1)
    }


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
    reduced = Collective("all_reduce", "backward", among.nbytes, 1, True, 8, 8)
    assert seconds_of(reduced, 64, NDR) == pytest.approx(2 * 7 / 8 * 4 * parameters / (0.9 * 400e9), rel=0.01)
    whole = of_fsdp(64, shard_degree=1)
    assert {place: one.nbytes for place, one in whole.items() if place[1] in ("forward", "backward")} == {
        ("all_reduce", "backward"): 4 * parameters
    }


@pytest.mark.parametrize(
    ("backend", "comm", "share"),
    [
        ("torch", {}, 1),
        ("torch", {"compression": "bf16"}, 0.5),
        ("horovod", {"compression": "fp16"}, 0.5),
    ],
)
def test_compressed_gradients_are_half_as_many_bytes_and_one_rank_sends_none(
    backend: str, comm: dict[str, Any], share: float
) -> None:
    sections: dict[str, Any] = {"comm": {"backend": backend, backend: comm}}
    assert (
        found_of(**sections)["all_reduce", "backward"].nbytes == share * 4 * shape_of("ViT-L-14").parameters
    )
    assert found_of(1, **sections) == {}


def test_an_all_reduce_is_bound_by_the_network_beyond_one_node() -> None:
    one = Collective("all_reduce", "backward", 1e9, 1, hidden=True)
    assert seconds_of(one, 8, NDR) == pytest.approx(2 * 7 / 8 * 1e9 / (0.9 * 450e9) + 5e-6)
    assert seconds_of(one, 16, ETHERNET) == pytest.approx(2 * 1 / 2 * 1e9 / (0.9 * 12.5e9) + 3 * 30e-6)
    assert seconds_of(one, 9, ETHERNET) == seconds_of(one, 16, ETHERNET), "a ninth GPU is on a second node"


def of_l_14(nodes: int, per_gpu: int = 256, **sections: Any) -> dict[str, Any]:
    """What check says of ViT-L-14 on nodes of eight H100s."""
    resources = {**NODES, "nodes": nodes, **sections.pop("resources", {})}
    return check(of_gpus("ViT-L-14", nodes * 8 * per_gpu, resources=resources, **sections))


@pytest.mark.parametrize(
    ("backend", "settings", "row", "efficiency"),
    [
        ("torch", {}, "torch", 0.985),
        ("fsdp", {}, "fsdp", 0.984),
        ("fsdp", {"shard_degree": "world"}, 'fsdp, `shard_degree = "world"`', 0.981),
        ("horovod", {}, "horovod", 0.983),
        ("horovod", {"cycle_ms": 1.0}, "horovod, `cycle_ms = 1`", 0.980),
    ],
)
def test_l_14_keeps_as_much_of_its_speed_on_1024_gpus_as_performance_md_says(
    backend: str, settings: dict[str, Any], row: str, efficiency: float
) -> None:
    """The goal of 0.98 is reached by each backend as a job is by default."""
    comm = {"backend": backend, backend: settings}
    shares = [of_l_14(nodes, comm=comm)["efficiency"] for nodes in (2, 16, 128)]
    assert 1 > shares[0] > shares[1] > shares[2] == pytest.approx(efficiency, abs=0.0005)
    assert of_l_14(128, comm=comm, resources={"fabric": "ethernet"})["efficiency"] < shares[2]
    assert settings or shares[2] >= 0.98
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
        return scaled_step(shape, job, plan, GPUS["H100"], FABRIC_RATES[fabric])

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
    gather = Collective("all_gather", "text", 256 * shape.embed_dim * 4, 1, hidden=True)
    alone, job = BatchPlan(1, 256, 256, 256, 1), tiny_job(config="ViT-L-14", model={"precision": "bf16"})
    text_s = (
        256 / step_speed(shape, job, alone, GPUS["H100"]).samples_s * text_forward_share(shape, job, alone)
    )
    assert seconds_of(gather, 1024, NDR) < text_s < seconds_of(gather, 1024, ETHERNET)
    assert waits[0] > seconds_of(gather, 1024, ETHERNET) - text_s
    for passes, beside in ((1, True), (2, False)):
        found = found_of(plan=BatchPlan(8, 800, 100, 100 // passes, passes))
        assert (("all_gather", "text") in found) is beside


@pytest.mark.parametrize(
    ("network", "gpu", "links"),
    [
        (None, "H100", "8 x 400 Gb/s InfiniBand (DGX H100 and H200), NVLink 4"),
        ("roce", "A100-80GB", "8 x 200 Gb/s InfiniBand (DGX A100), NVLink 3"),
        ("ib", "B300", "8 x 800 Gb/s InfiniBand (DGX B300), NVLink 5"),
        ("efa", "H200", "32 x 100 Gb/s EFA (AWS p5), NVLink 4"),
        ("efa", "A100-40GB", "4 x 100 Gb/s EFA (AWS p4d), NVLink 3"),
        ("ethernet", "L40S", "100 Gb/s Ethernet, GPUs over PCIe 4.0 x16"),
    ],
)
def test_a_network_has_the_rates_of_nodes_with_the_jobs_gpu(
    network: str | None, gpu: str, links: str
) -> None:
    step, _ = of_l_14(2, 64, resources={"fabric": network, "gpu": gpu})["rows"]["scaling"]
    assert step.startswith("a step takes about ")
    assert step.endswith(f"; assumed: {links}")


def test_check_says_what_a_step_takes_and_what_more_nodes_bring() -> None:
    found = of_l_14(2)
    shares = [f"{100 * of_l_14(nodes)['efficiency']:.1f} %" for nodes in (2, 4, 8, 16)]
    assert found["rows"]["scaling"][1] == (
        f"each GPU keeps {shares[0]} of its speed alone, and with as many samples on each {shares[1]} on 4 "
        f"nodes, {shares[2]} on 8 nodes, {shares[3]} on 16 nodes; not measured (docs/performance.md)"
    )
    slow = of_l_14(2, resources={"fabric": "ethernet"})
    assert slow["step_s"] > found["step_s"] > 256 / (found["samples_per_s"] / 16)
    assert 0 < slow["efficiency"] < found["efficiency"] < 1
    here = check(
        {name: its for name, its in of_gpus(resources={"gpus_per_node": 8}).items() if name != "slurm"}
    )
    for unknown in (of_l_14(2, resources={"gpu": None}), here):
        assert "scaling" not in unknown["rows"]
        assert (unknown["step_s"], unknown["efficiency"]) == (None, None)
