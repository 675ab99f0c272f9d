"""`clipship plan scaling`: what a step's collectives cost on many GPUs, by a model."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.jobs import VIT, tiny_job
from trainer.cli.plan import command
from trainer.comm.backends import BACKENDS
from trainer.config import Job, Model
from trainer.config.batch_plan import BatchPlan
from trainer.config.fabric_rates import FABRIC_RATES
from trainer.config.gpus import GPUS
from trainer.estimate.architecture import Architecture, architecture
from trainer.estimate.scaling import Collective, Scaling, collectives, seconds_of, weak_scaling
from trainer.estimate.step_speed import step_speed, text_forward_share

NDR, ETHERNET = FABRIC_RATES["NDR"], FABRIC_RATES["ETH-100"]


def l_14(kernels: str = "fast", **optim: Any) -> tuple[Architecture, Job]:
    shape = architecture(Model(name="ViT-L-14"))
    assert shape is not None
    model = {"precision": "bf16", "kernels": kernels}
    comm = {
        "launcher": "mpirun"
    }  # on one node, too, so that Horovod's rounds are MPI's on any number of GPUs
    return shape, tiny_job(config="ViT-L-14", model=model, optim=optim, comm=comm)


def scaled(
    gpus: int,
    backend: str = "torch",
    fabric: str = "NDR",
    per_gpu: int = 256,
    kernels: str = "fast",
    **optim: Any,
) -> Scaling:
    shape, job = l_14(kernels, **optim)
    return weak_scaling(shape, job, per_gpu, gpus, GPUS["H100"], FABRIC_RATES[fabric], backend, 25)


def given(found: list[Collective]) -> dict[tuple[str, str], float]:
    """Bytes by kind and place."""
    return {(one.what, one.place): one.nbytes for one in found}


@pytest.mark.parametrize("tiles", [False, True])
def test_the_loss_gives_what_performance_md_says(tiles: bool) -> None:
    shape, job = l_14()
    found = collectives(shape, job, BatchPlan(8, 800, 100, 100, 1), "torch", 25 * 2**20, tiles=tiles)
    own, everybody = 100 * 768 * 4, 800 * 768 * 4
    of_loss = [(one.what, one.nbytes) for one in found if one.place in ("text", "loss")]
    last = ("all_gather", 2 * 100 * 4) if tiles else ("reduce_scatter", 2 * everybody)
    assert of_loss == [("all_gather", own), ("all_gather", own), last]
    assert given(found)["all_reduce", "backward"] == 4 * shape.parameters


def test_parts_of_the_model_travel_in_half_precision_and_gradients_in_float32() -> None:
    shape, job = l_14()
    found = given(collectives(shape, job, BatchPlan(8, 800, 100, 100, 1), "fsdp", 1, tiles=True))
    assert found["all_gather", "forward"] == found["all_gather", "backward"] == 2 * shape.parameters / 8
    assert found["reduce_scatter", "backward"] == 4 * shape.parameters


def of_fsdp(world: int, **fsdp: Any) -> dict[tuple[str, str], Collective]:
    shape, _ = l_14()
    job = tiny_job(config="ViT-L-14", model={"precision": "bf16"}, comm={"backend": "fsdp", "fsdp": fsdp})
    found = collectives(shape, job, BatchPlan(world, 100 * world, 100, 100, 1), "fsdp", 1, tiles=True)
    return {(one.what, one.place): one for one in found if one.place in ("forward", "backward")}


def test_copies_of_the_model_on_each_node_gather_within_it_and_reduce_their_rows_between_nodes() -> None:
    shape, _ = l_14()
    found = of_fsdp(64, shard_degree="node")
    assert of_fsdp(64) == found, "several nodes of eight ranks do so by default"
    gather, scatter = found["all_gather", "forward"], found["reduce_scatter", "backward"]
    assert (gather.ranks, gather.stride, gather.nbytes) == (8, 1, 2 * shape.parameters / 8)
    assert (scatter.ranks, scatter.stride, scatter.nbytes) == (8, 1, 4 * shape.parameters)
    among = found["all_reduce", "backward"]
    assert (among.ranks, among.stride, among.nbytes) == (8, 8, 4 * shape.parameters / 8)
    assert len(found) == 4
    rate = 0.9 * 450e9
    hops_s = gather.times * 5e-6
    assert seconds_of(gather, 64, NDR) == pytest.approx(7 / 8 * 2 * shape.parameters / rate + hops_s)
    # The eight GPUs of a node reduce eight parts at once, over the links that they share.
    reduced_s = seconds_of(Collective("all_reduce", "backward", among.nbytes, 1, True, 8, 8), 64, NDR)
    assert reduced_s == pytest.approx(2 * 7 / 8 * 4 * shape.parameters / (0.9 * 400e9), rel=0.01)


def test_every_rank_with_its_own_copy_reduces_as_torch_does() -> None:
    shape, _ = l_14()
    found = of_fsdp(64, shard_degree=1)
    assert list(found) == [("all_reduce", "backward")]
    assert found["all_reduce", "backward"].nbytes == 4 * shape.parameters


def test_types_and_kept_parameters_change_what_travels() -> None:
    plain = of_fsdp(8)
    gather, scatter = ("all_gather", "backward"), ("reduce_scatter", "backward")
    assert of_fsdp(8, param_dtype="fp32")[gather].nbytes == 2 * plain[gather].nbytes
    assert of_fsdp(8, reduce_dtype="bf16")[scatter].nbytes == plain[scatter].nbytes / 2
    assert gather not in of_fsdp(8, reshard_after_forward=False)


@pytest.mark.parametrize(("backend", "name"), [("torch", "bf16"), ("horovod", "fp16")])
def test_compressed_gradients_are_half_as_many_bytes(backend: str, name: str) -> None:
    shape, _ = l_14()
    job = tiny_job(config="ViT-L-14", comm={"backend": backend, backend: {"compression": name}})
    found = given(collectives(shape, job, BatchPlan(8, 800, 100, 100, 1), backend, 1, tiles=True))
    assert found["all_reduce", "backward"] == 2 * shape.parameters


def test_a_single_rank_has_no_collectives() -> None:
    shape, job = l_14()
    for backend in ("torch", "fsdp", "horovod"):
        assert collectives(shape, job, BatchPlan(1, 100, 100, 100, 1), backend, 1, tiles=False) == []


def test_an_all_reduce_is_bound_by_the_network_beyond_one_node() -> None:
    one = Collective("all_reduce", "backward", 1e9, 1, hidden=True)
    assert seconds_of(one, 8, NDR) == pytest.approx(2 * 7 / 8 * 1e9 / (0.9 * 450e9) + 5e-6)
    assert seconds_of(one, 16, ETHERNET) == pytest.approx(2 * 1 / 2 * 1e9 / (0.9 * 12.5e9) + 3 * 30e-6)
    assert seconds_of(one, 9, ETHERNET) == seconds_of(one, 16, ETHERNET), "a ninth GPU is on a second node"


@pytest.mark.parametrize("backend", ["torch", "fsdp", "horovod"])
def test_efficiency_falls_with_the_number_of_gpus_and_with_a_slow_network(backend: str) -> None:
    steps = [scaled(gpus, backend, loss_tile=2048) for gpus in (1, 8, 64, 1024)]
    shares = [step.efficiency for step in steps]
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert all(step.efficiency <= step.communication for step in steps)
    assert scaled(1024, backend, "ETH-100", loss_tile=2048).efficiency < shares[-1]


@pytest.mark.parametrize(
    ("backend", "settings", "bucket_mb", "row", "efficiency"),
    [
        ("torch", {}, 25, "torch", 0.985),
        ("fsdp", {}, 27, "fsdp", 0.984),
        ("fsdp", {"shard_degree": "world"}, 27, 'fsdp, `shard_degree = "world"`', 0.981),
        ("horovod", {}, 25, "horovod", 0.983),
        ("horovod", {"cycle_ms": 1.0}, 25, "horovod, `cycle_ms = 1`", 0.980),
    ],
)
def test_l_14_keeps_as_much_of_its_speed_on_1024_gpus_as_performance_md_says(
    backend: str, settings: dict[str, Any], bucket_mb: float, row: str, efficiency: float
) -> None:
    """The goal of 0.98 is reached by each backend as a job is by default."""
    shape, _ = l_14()
    comm = {"backend": backend, backend: settings}

    def found(**optim: Any) -> Scaling:
        job = tiny_job(config="ViT-L-14", model={"precision": "bf16"}, comm=comm, optim=optim)
        return weak_scaling(shape, job, 256, 1024, GPUS["H100"], NDR, backend, bucket_mb)

    assert found().tiles
    assert found().efficiency == pytest.approx(efficiency, abs=0.0005)
    assert settings or found().efficiency >= 0.98
    assert found(loss_tile=0).efficiency < found().efficiency - 0.03
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")
    (cells,) = (line.split(" | ") for line in page.splitlines() if line.startswith(f"| {row} | "))
    assert float(cells[4]) == efficiency


def test_gradients_that_travel_alone_are_not_reckoned_as_ever_more() -> None:
    alone = tiny_job(comm={"backend": "horovod", "horovod": {"fusion_mb": 0.0}})
    assert BACKENDS["horovod"].reduced_mb(alone.comm) == 1.0


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


def test_a_node_computes_the_loss_at_once_and_several_compute_it_in_tiles_with_products_in_tf32() -> None:
    assert [scaled(gpus).tiles for gpus in (8, 16)] == [False, True]
    tf32, fp32 = (scaled(64, kernels=kernels).loss_s for kernels in ("fast", "plain"))
    assert fp32 == pytest.approx(tf32 * 494 / 67)


def test_with_micro_batches_no_gather_of_images_runs_beside_the_text_tower() -> None:
    shape, job = l_14()
    for micro_batch, place in ((100, "text"), (50, "loss")):
        batch_plan = BatchPlan(8, 800, 100, micro_batch, 100 // micro_batch)
        found = collectives(shape, job, batch_plan, "torch", 1, tiles=True)
        assert [one.hidden for one in found if one.place == "text"] == [True] * (place == "text")


def test_a_gather_of_images_longer_than_the_text_tower_is_waited_for() -> None:
    """On a slow network the gather takes longer than the text tower, and more samples make both longer."""
    shape, job = l_14(loss_tile=2048)
    gather = Collective("all_gather", "text", 256 * shape.embed_dim * 4, 1, hidden=True)
    text_s = 256 / step_speed(shape, job, BatchPlan(1, 256, 256, 256, 1), GPUS["H100"]).samples_s
    text_s *= text_forward_share(shape, job, BatchPlan(1, 256, 256, 256, 1))
    assert seconds_of(gather, 1024, NDR) < text_s < seconds_of(gather, 1024, ETHERNET)
    assert (
        scaled(1024, fabric="ETH-100", loss_tile=2048).exposed_s > seconds_of(gather, 1024, ETHERNET) - text_s
    )


def test_a_faster_step_waits_as_long_for_the_network_and_so_a_larger_share_of_its_time() -> None:
    fast = scaled(1024, loss_tile=2048)
    plain = scaled(1024, kernels="plain", loss_tile=2048)
    assert fast.exposed_s - plain.exposed_s == pytest.approx((plain.loss_s - fast.loss_s) / 6)
    assert plain.communication >= 0.98
    assert fast.step_s < plain.step_s
    assert fast.communication < plain.communication


def job_file(folder: Path, model: str = "ViT-B-32") -> str:
    path = folder / "job.toml"
    path.write_text(
        'name = "n"\n[data]\nformat = "synthetic"\nsynthetic_samples = 64\n'
        f'[model]\nname = "{model}"\nprecision = "bf16"\n[optim]\nglobal_batch_size = 512\nsteps = 1\n'
    )
    return str(path)


def test_the_command_prints_each_backend_and_what_it_assumes(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["scaling", job_file(tmp_path), "--gpus", "16", "--gpu", "H200"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[1].startswith("assumed       512 samples on each H200; NDR: 8 x 400 Gb/s InfiniBand")
    assert "not measured" in lines[2]
    assert [line.split()[:2] for line in lines if line.startswith("horovod")] == [
        ["horovod", "1"],
        ["horovod", "8"],
        ["horovod", "16"],
    ]


def test_json_has_the_same_figures(tmp_path: Path) -> None:
    options = ["--gpus", "64", "--per-gpu", "32", "--json", "--set", "optim.loss_tile=2048"]
    result = CliRunner().invoke(command, ["scaling", job_file(tmp_path), *options])
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert (told["per_gpu"], told["gpu"], told["fabric"]) == (32, "H100", "NDR")
    last = [row for row in told["scaling"] if row["backend"] == "torch"][-1]
    assert last["gpus"] == 64
    assert 0 < last["efficiency"] <= last["communication"] < 1
    assert last["tiles"] is True


def test_a_model_of_unknown_size_is_refused(tmp_path: Path) -> None:
    assert architecture(Model(name=VIT)) is not None
    result = CliRunner().invoke(command, ["scaling", job_file(tmp_path, "RN50")])
    assert result.exit_code != 0
    assert "the config of RN50 does not say its size" in str(result.exception)
