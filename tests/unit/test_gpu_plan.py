"""`clipship check` says what a step takes of a GPU, what fits, and how long the run takes at best."""

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from open_clip.model import _build_vision_tower

from tests.support.jobs import RESNET, VIT, tiny_job
from trainer.config import Job, Model
from trainer.config.batch_plan import plan
from trainer.config.gpus import GIB, GPUS, GpuName
from trainer.errors import InputError
from trainer.estimate.architecture import architecture
from trainer.estimate.fit import fits, largest_micro_batch, usable_bytes, with_gpu_limit, with_micro_batch
from trainer.estimate.step_memory import step_memory
from trainer.estimate.step_speed import step_speed, training_flops
from trainer.model import catalog
from trainer.model.catalog import config_file
from trainer.plan.check import check_without_files
from trainer.plan.describe import describe


def job_of(config: str = "ViT-B-32", batch: int = 1024, *, gpu: str | None = "H100", **sections: Any) -> Job:
    return tiny_job(
        config=config,
        model={"precision": "bf16", **sections.pop("model", {})},
        optim={"global_batch_size": batch, **sections.pop("optim", {})},
        resources={"gpus_per_node": 1, "gpu": gpu, **sections.pop("resources", {})},
        **sections,
    )


def rows_of(job: Job, ranks: int = 1, samples: int = 64) -> list[str]:
    return describe(job, ranks, samples, local=False, files=False).splitlines()


def test_the_table_has_the_gpus_that_a_job_may_name() -> None:
    assert tuple(GPUS) == get_args(GpuName)
    for gpu in GPUS.values():
        assert gpu.tflops["bf16"] > gpu.tflops["tf32"] >= gpu.tflops["fp32"]
        assert gpu.memory == int(gpu.memory_gib * GIB)


def test_rates_that_were_measured_give_the_estimate_of_a_data_sheet() -> None:
    h100 = GPUS["H100"]
    rates = {"memory_gib": h100.memory_gib, "tflops": 0.79 * 989, "bandwidth_gb_s": 0.9 * 3350}
    by_rates = rows_of(job_of(gpu=None, resources={"gpu_rates": rates}))
    assert [row.replace("own GPU", "H100") for row in by_rates] == rows_of(job_of())
    with pytest.raises(ValueError, match="remove gpu or gpu_rates"):
        job_of(resources={"gpu_rates": rates})


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("ViT-B-32", 151.3),
        ("ViT-L-14", 427.6),
        ("ViT-bigG-14", 2539.6),
        ("ViT-B-16-SigLIP", 203.2),
        ("ViT-SO400M-14-SigLIP", 877.4),
    ],
)
def test_parameters_of_known_models(name: str, millions: float) -> None:
    shape = architecture(Model(name=name))
    assert shape is not None
    assert shape.parameters / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-16-SigLIP"])
def test_tokens_of_a_model_with_patch_dropout_are_those_that_its_blocks_get(name: str) -> None:
    shape, whole = architecture(Model(name=name, patch_dropout=0.4)), architecture(Model(name=name))
    assert shape is not None
    assert whole is not None
    config = json.loads(config_file(name).read_text())
    with torch.device("meta"):
        visual = _build_vision_tower(config["embed_dim"], {**config["vision_cfg"], "patch_dropout": 0.4})
        blocks = visual.trunk.blocks if hasattr(visual, "trunk") else visual.transformer.resblocks
        got: list[int] = []
        blocks[0].register_forward_pre_hook(lambda _, given: got.append(given[0].shape[1]))
        visual.train()(torch.zeros(2, 3, *shape.image_size))
    assert got == [shape.image.tokens]
    assert shape.parameters == whole.parameters


@pytest.mark.parametrize("name", ["RN50", "EVA02-B-16", "roberta-ViT-B-32", "coca_ViT-B-32", "hf-hub:a/b"])
def test_models_whose_config_does_not_say_their_size_have_none_and_check_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert architecture(Model(name=name)) is None
    found = [line for line in rows_of(job_of(name)) if line.startswith(("memory", "estimate"))]
    says = f"not known: the config of {name} does not say its size (docs/performance.md)"
    if name == "roberta-ViT-B-32":
        says = "not known: what the activations of the text tower roberta-base take is not estimated"
    assert len(found) == 1
    assert found[0].startswith(f"memory      {says}")
    monkeypatch.setattr("trainer.plan.device.known_models", list)
    assert not any(line.startswith("memory") for line in rows_of(job_of(name)))


def test_peak_memory_of_b_32_is_what_performance_md_measured() -> None:
    shape = architecture(Model(name="ViT-B-32"))
    assert shape is not None
    memory = step_memory(shape, job_of(), plan(job_of(), 1))
    assert memory.total / GIB == pytest.approx(34.02, rel=0.03)


def test_several_ranks_hold_gradients_all_the_time_and_parts_of_the_model_if_it_is_split() -> None:
    job, shape = job_of(), architecture(Model(name="ViT-B-32"))
    assert shape is not None
    two = step_memory(shape, job, plan(job, 2))
    assert two.gradients == 4 * shape.parameters
    split = step_memory(shape, job, plan(job, 2), shards=2)
    assert split.optimizer == two.optimizer // 2
    assert split.gradients <= two.gradients // 2


@pytest.mark.parametrize(
    ("name", "samples", "model", "fsdp", "gib"),
    [
        ("ViT-bigG-14", 16, {"grad_checkpointing": True}, {}, 5.7),
        ("ViT-bigG-14", 64, {"grad_checkpointing": True}, {}, 8.2),
        ("ViT-H-14", 16, {}, {"param_dtype": "fp32"}, 9.74),
        ("ViT-H-14", 4, {}, {"reshard_after_forward": False}, 4.97),
    ],
)
def test_a_model_split_over_8_ranks_takes_what_the_allocator_gave_out(
    name: str, samples: int, model: dict[str, Any], fsdp: dict[str, Any], gib: float
) -> None:
    job = job_of(name, 8 * samples, model=model, comm={"backend": "fsdp", "fsdp": fsdp})
    shape = architecture(Model(name=name))
    assert shape is not None
    assert step_memory(shape, job, plan(job, 8), shards=8).total / GIB == pytest.approx(gib, rel=0.05)


def test_gradients_reduced_in_half_precision_take_half_as_much_while_they_wait() -> None:
    shape = architecture(Model(name="ViT-H-14"))
    assert shape is not None

    def weights(**fsdp: Any) -> int:
        job = job_of("ViT-H-14", 128, comm={"backend": "fsdp", "fsdp": fsdp})
        return step_memory(shape, job, plan(job, 8), shards=8).weights

    block = 12 * 1280**2
    assert weights() - weights(reduce_dtype="bf16") == 2 * block


@pytest.mark.parametrize("model", ["ViT-B-32", "ViT-L-14", "ViT-B-16-SigLIP"])
def test_the_largest_micro_batch_fits_and_one_more_sample_does_not(model: str) -> None:
    shape, memory = architecture(Model(name=model)), GPUS["L40S"].memory
    assert shape is not None
    most = largest_micro_batch(shape, job_of(model, batch=4), 4, memory)
    assert most > 4
    for samples, fitting in ((most, True), (most + 1, False)):
        job = job_of(model, batch=4 * samples)
        assert fits(shape, job, plan(job, 4), memory) is fitting


def test_auto_takes_equal_micro_batches_that_fit() -> None:
    job = job_of("ViT-L-14", 32_768, optim={"max_batch_size_per_gpu": "auto"})
    shape = architecture(Model(name="ViT-L-14"))
    assert shape is not None
    chosen = with_gpu_limit(job, 64)
    assert isinstance(chosen.optim.max_batch_size_per_gpu, int)
    batch_plan = plan(chosen, 64)
    assert batch_plan.micro_batch_size <= chosen.optim.max_batch_size_per_gpu
    assert fits(shape, job, batch_plan, GPUS["H100"].memory)
    assert plan(job, 64).accumulation == 1, "without a GPU's name nothing limits it before the start"
    assert with_micro_batch(job, 64, None).optim.max_batch_size_per_gpu is None


def test_auto_is_refused_where_the_arithmetic_cannot_tell() -> None:
    with pytest.raises(InputError, match=r'"auto": the config of .*tiny-resnet.json does not say .* number'):
        check_without_files(job_of(RESNET, 16, optim={"max_batch_size_per_gpu": "auto"}), 1)
    cpu = job_of(RESNET, 16, optim={"max_batch_size_per_gpu": "auto"}, resources={"device": "cpu"})
    assert check_without_files(cpu, 1) == 64


def test_auto_is_refused_beside_a_teacher_whose_memory_nobody_counts() -> None:
    job = job_of("ViT-B-32", 1024, optim={"max_batch_size_per_gpu": "auto"})
    job = job.model_copy(update={"model": job.model.model_copy(update={"teacher": "ViT-L-14"})})
    with pytest.raises(InputError, match="the memory of the teacher, ViT-L-14, is not estimated: give a n"):
        check_without_files(job, 1)


def test_auto_is_left_to_the_ranks_where_open_clip_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_config_folders", list)
    job = job_of("ViT-L-14", 32_768, optim={"max_batch_size_per_gpu": "auto"})
    check_without_files(job, 64)
    text = "the ranks choose by the memory of their GPUs"
    assert any(line.startswith("batch") and text in line for line in rows_of(job, 64))


def test_auto_is_refused_if_not_even_one_sample_fits() -> None:
    job = job_of("ViT-bigG-14", 64, gpu="RTX-4090", optim={"max_batch_size_per_gpu": "auto"})
    with pytest.raises(InputError, match=r"not even one sample of ViT-bigG-14 fits a GPU of 23.5 GiB: "):
        check_without_files(job, 8)


def test_check_says_memory_what_fits_and_how_long_it_takes() -> None:
    lines = rows_of(job_of(batch=8192, optim={"steps": 1000}), ranks=8)
    memory = next(line for line in lines if line.startswith("memory"))
    assert memory.startswith("memory      about 34.4 GiB of 79.1 (H100): activations 31.4, optimizer 1.1")
    after = lines[lines.index(memory) + 1]
    assert after.strip().startswith("up to 2,")
    assert after.endswith("samples fit in one forward pass (optim.max_batch_size_per_gpu)")
    estimate = next(line for line in lines if line.startswith("estimate"))
    assert "samples/s on 8 H100s (MFU 0." in estimate
    assert "GPU-hours at least; from the GPU's peak rates, not measured" in estimate
    assert not any(line.startswith("warning     a step of") for line in lines)


def test_without_a_name_of_the_gpu_check_says_memory_alone() -> None:
    lines = rows_of(job_of(gpu=None))
    assert any(line.startswith("memory      about 33.9 GiB on each GPU: activations 31.4") for line in lines)
    assert not any(line.startswith("estimate") for line in lines)


def test_a_job_on_cpus_has_no_line_about_gpus() -> None:
    assert not any(
        line.startswith(("memory", "estimate")) for line in rows_of(job_of(resources={"device": "cpu"}))
    )


def test_a_step_that_does_not_fit_is_told_with_what_would() -> None:
    (warning,) = (line for line in rows_of(job_of("ViT-L-14", 512, gpu="RTX-4090")) if "too much for" in line)
    assert "a step of 512 samples takes about 115." in warning
    assert "RTX-4090 with 23.5 GiB: set optim.max_batch_size_per_gpu = " in warning
    assert "or model.grad_checkpointing = true (then up to " in warning


def test_an_estimate_is_below_the_peak_and_follows_the_products() -> None:
    job, shape = job_of(), architecture(Model(name="ViT-B-32"))
    assert shape is not None
    # 14.5 GFLOP for one sample's forward pass; a backward pass has twice as many.
    assert training_flops(shape, job) == pytest.approx(3 * 14.5e9, rel=0.02)
    speeds = [step_speed(shape, job, plan(job, 1), gpu) for gpu in GPUS.values()]
    assert all(0 < speed.mfu < 1 for speed in speeds)
    checkpointed = job_of(model={"grad_checkpointing": True})
    slower = step_speed(shape, checkpointed, plan(job, 1), GPUS["H100"])
    assert slower.samples_s < step_speed(shape, job, plan(job, 1), GPUS["H100"]).samples_s
    assert slower.hours(3600, 2) == pytest.approx(0.5 / slower.samples_s)


def test_locked_towers_take_no_state_and_no_activations() -> None:
    job = job_of(VIT, 16, model={"lock_image": True})
    shape = architecture(job.model)
    assert shape is not None
    memory = step_memory(shape, job, plan(job, 1))
    whole = step_memory(replace(shape, unlocked=(None, None)), job_of(VIT, 16), plan(job, 1))
    assert memory.optimizer == 8 * shape.text.parameters
    assert memory.activations < whole.activations
    assert usable_bytes(100 * GIB) == 90 * GIB - GIB // 2
