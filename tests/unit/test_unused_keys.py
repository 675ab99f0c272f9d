"""`clipship check` names the keys that a job sets without effect."""

from pathlib import Path
from typing import Any

import pytest

from trainer.config import Job
from trainer.config.keys import conditions_of, walk
from trainer.config.loader import dump_job, job_from_table, load_job
from trainer.plan.describe import describe
from trainer.plan.unused_keys import BY_LAUNCHER, unused_keys
from trainer.presets.files import preset_names
from trainer.presets.wishes import Wishes, job_text

SHARDS = {"train": ["a.tar"]}
SYNTHETIC = {"format": "synthetic"}


def job_of(**sections: dict[str, Any]) -> Job:
    job: dict[str, Any] = {"name": "run", "data": SHARDS, "optim": {"global_batch_size": 4, "steps": 2}}
    for section, keys in sections.items():
        job[section] = {**job.get(section, {}), **keys} if section != "data" else keys
    return job_from_table(job, "a test")


def unused(**sections: dict[str, Any]) -> dict[str, str]:
    return {key: why for keys, why in unused_keys(job_of(**sections)) for key in keys}


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "image.mirrors.registry",
        {"image": {"tag": "x:1", "base": "nvcr.io/x/y:1", "mirrors": {"registry": "mirror.example"}}},
        {"image": {"base": "docker.io/library/debian:12"}},
    ),
    ("optim.caption_weight", {"optim": {"caption_weight": 1.0}}, {"optim": {"loss": "coca"}}),
    ("optim.contrast_weight", {"optim": {"contrast_weight": 2.0}}, {"optim": {"loss": "coca"}}),
    (
        "optim.distill_weight",
        {"optim": {"distill_weight": 2.0}},
        {"model": {"teacher": "ViT-B-32", "teacher_pretrained": "openai"}},
    ),
    (
        "optim.distill_temperature",
        {"optim": {"distill_temperature": 0.07}},
        {"model": {"teacher": "ViT-B-32", "teacher_pretrained": "openai"}},
    ),
    (
        "model.init_keep_positions",
        {"model": {"init_keep_positions": 20}},
        {"model": {"init": "weights.pt"}},
    ),
    ("data.cache_gb", {"data": {**SHARDS, "cache_gb": 8}}, {"data": {"cache": "/local"}}),
    ("checkpoint.copy_wait_s", {"checkpoint": {"copy_wait_s": 9.0}}, {"checkpoint": {"copy_to": "/far"}}),
    ("data.read_ahead_mb", {"data": {**SYNTHETIC, "read_ahead_mb": 8}}, {"data": {**SHARDS}}),
    ("data.synthetic_samples", {"data": {**SHARDS, "synthetic_samples": 8}}, {"data": {**SYNTHETIC}}),
    ("data.on_bad_sample", {"data": {**SYNTHETIC, "on_bad_sample": "fail"}}, {"data": {**SHARDS}}),
    (
        "data.max_image_pixels",
        {"data": {**SYNTHETIC, "max_image_pixels": 9}},
        {"eval": {"retrieval": ["b.tar"]}},
    ),
    ("data.image_key", {"data": {"train": ["a.csv"], "image_key": ["x"]}}, {"eval": {"zero_shot": ["b"]}}),
    (
        "data.caption_key",
        {"data": {"train": ["a.csv"], "caption_key": "x"}},
        {"eval": {"retrieval": ["b.tar"]}},
    ),
    (
        "data.caption_choice",
        {"data": {"train": ["a.csv"], "caption_choice": "first"}},
        {"data": {**SHARDS, "caption_choice": "first"}},
    ),
    (
        "data.caption_weights",
        {"data": {**SYNTHETIC, "caption_weights": [1.0]}},
        {"eval": {"retrieval": ["b.tar"]}},
    ),
    (
        "data.scores_by",
        {"data": {**SHARDS, "scores_by": "json:uid", "filters": ["a > 1"]}},
        {"data": {"scores": ["s.txt"], "filters": ["scores:listed == true"]}},
    ),
    ("data.group_by", {"data": {**SHARDS, "group_by": "json:g"}}, {"optim": {"positives": "groups"}}),
    (
        "data.filters",
        {"data": {**SYNTHETIC, "filters": ["a > 1"]}},
        {"data": {**SHARDS}},
    ),
    (
        "data.row_group_cache_mb",
        {"data": {**SHARDS, "row_group_cache_mb": 9}},
        {"eval": {"retrieval": ["b.parquet"]}},
    ),
    (
        "data.augment.rand_augment_magnitude",
        {"data": {**SHARDS, "augment": {"rand_augment_magnitude": 5}}},
        {"data": {"augment": {"rand_augment_ops": 1}}},
    ),
    (
        "data.augment.color_jitter",
        {"data": {**SHARDS, "augment": {"color_jitter": [0.1, 0.1, 0.1, 0.1]}}},
        {"data": {"augment": {"color_jitter_prob": 0.5}}},
    ),
    (
        "data.augment.erase_count",
        {"data": {**SHARDS, "augment": {"erase_count": 2}}},
        {"data": {"augment": {"erase_prob": 0.5}}},
    ),
    (
        "data.encoding",
        {"data": {**SYNTHETIC, "encoding": "gb18030"}},
        {"eval": {"retrieval": ["b.csv"]}},
    ),
    ("data.image_column", {"data": {**SHARDS, "image_column": "i"}}, {"eval": {"retrieval": ["b.csv"]}}),
    (
        "data.caption_column",
        {"data": {"train": ["a.csv"], "caption_column": "c", "caption_template": "{t}"}},
        {"data": {"caption_template": []}},
    ),
    ("data.separator", {"data": {**SHARDS, "separator": ";"}}, {"eval": {"retrieval": ["b.csv"]}}),
    ("data.index", {"data": {"train": ["a.csv"], "index": "i"}}, {"data": {**SHARDS}}),
    (
        "data.block_samples",
        {"data": {"train": ["a.parquet"], "block_samples": 8}},
        {"data": {**SHARDS, "block_samples": 8}},
    ),
    (
        "data.read_ahead_mb",
        {"data": {"train": ["a.arrow"], "read_ahead_mb": 8}},
        {"data": {"train": ["a.parquet"], "read_ahead_mb": 8}},
    ),
    (
        "data.stream_samples",
        {"data": {**SHARDS, "stream_samples": 9}},
        {"data": {"train": ["pipe:cat a.tar"]}},
    ),
    (
        "data.max_bad_share",
        {"data": {**SHARDS, "max_bad_share": 0.5, "on_bad_sample": "fail"}},
        {"data": {**SHARDS, "on_bad_sample": "skip"}},
    ),
    ("eval.batch_size", {"eval": {"batch_size": 8}}, {"eval": {"retrieval": ["b.tar"]}}),
    ("eval.batch_size", {"eval": {"batch_size": 8}}, {"eval": {"suite": {"root": "b"}}}),
    ("eval.templates", {"eval": {"templates": ["{}"]}}, {"eval": {"suite": {"folders": ["b"]}}}),
    (
        "eval.class_names",
        {"eval": {"class_names": ["c"], "retrieval": ["b.tar"]}},
        {"eval": {"zero_shot": ["b.tar"]}},
    ),
    ("timeouts.eval_s", {"timeouts": {"eval_s": 8.0}}, {"eval": {"retrieval": ["b.tar"]}}),
    (
        "eval.templates",
        {"eval": {"templates": ["{}"], "retrieval": ["b.tar"]}},
        {"eval": {"zero_shot": ["b"]}},
    ),
    (
        "eval.class_key",
        {"eval": {"class_key": "n", "zero_shot": ["b"]}},
        {"eval": {"zero_shot": ["b.tar"], "class_names": ["c"]}},
    ),
    (
        "model.cuda_graphs",
        {"model": {"cuda_graphs": True}, "resources": {"accelerator": "rocm"}},
        {"resources": {"accelerator": "cuda"}},
    ),
    (
        "model.cudnn_benchmark",
        {"model": {"cudnn_benchmark": True}, "resources": {"device": "cpu"}},
        {"resources": {"device": "gpu"}},
    ),
    (
        "model.cudnn_benchmark",
        {"model": {"cudnn_benchmark": True}, "comm": {"deterministic": True}},
        {"comm": {"deterministic": False}},
    ),
    (
        "resources.gpu",
        {"resources": {"gpu": "H100", "gpus_per_node": 0}},
        {"resources": {"gpus_per_node": 1}},
    ),
    (
        "comm.torch.bucket_mb",
        {"comm": {"torch": {"bucket_mb": 1.0}, "backend": "fsdp"}},
        {"comm": {"backend": "torch"}},
    ),
    (
        "comm.torch.bucket_mb",
        {"comm": {"torch": {"bucket_mb": 1.0}, "deterministic": True}},
        {"comm": {"deterministic": False}},
    ),
    (
        "comm.torch.device_backend",
        {"comm": {"torch": {"device_backend": "gloo"}, "backend": "horovod"}},
        {"comm": {"backend": "fsdp"}},
    ),
    ("comm.fsdp.shard_degree", {"comm": {"fsdp": {"shard_degree": "node"}}}, {"comm": {"backend": "fsdp"}}),
    (
        "comm.horovod.hierarchical_allreduce",
        {"comm": {"backend": "horovod", "horovod": {"hierarchical_allreduce": True}}},
        {"comm": {"backend": "horovod", "launcher": "mpirun"}},
    ),
    ("comm.horovod.cycle_ms", {"comm": {"horovod": {"cycle_ms": 2.0}}}, {"comm": {"backend": "horovod"}}),
    (
        "comm.nccl.ib_hca",
        {"comm": {"nccl": {"ib_hca": "mlx5_0"}, "torch": {"device_backend": "gloo"}}},
        {"comm": {"backend": "horovod"}},
    ),
    ("recovery.backoff_s", {"recovery": {"backoff_s": 1.0}}, {"recovery": {"max_restarts": 1}}),
    (
        "recovery.keep_every_steps",
        {"recovery": {"max_restarts": 1, "keep_in_memory": False, "keep_every_steps": 2}},
        {"recovery": {"keep_in_memory": True}},
    ),
    (
        "optim.beta2",
        {"optim": {"optimizer": "sgd", "beta2": 0.9}},
        {"optim": {"optimizer": "lion"}},
    ),
    ("optim.eps", {"optim": {"optimizer": "lion", "eps": 1e-8}}, {"optim": {"optimizer": "adamw"}}),
    *(
        (
            key,
            {"model": {key.removeprefix("model."): value}},
            {"model": {"lora_rank": 4, "pretrained": "openai"}},
        )
        for key, value in (
            ("model.lora_alpha", 8.0),
            ("model.lora_towers", "text"),
            ("model.lora_targets", ["*.attn.*"]),
        )
    ),
    ("optim.ema_from_step", {"optim": {"ema_from_step": 1}}, {"optim": {"ema_decay": 0.99}}),
    (
        "optim.no_decay",
        {"optim": {"weight_decay": 0.0, "no_decay": ["*pos*"]}},
        {"optim": {"weight_decay": 0.1}},
    ),
    (
        "optim.image_lr",
        {"model": {"lock_image": True}, "optim": {"image_lr": 1e-4}},
        {"model": {"lock_image_unlocked_groups": 1}},
    ),
    (
        "optim.text_layer_decay",
        {"model": {"lock_text": True}, "optim": {"text_layer_decay": 0.9}},
        {"model": {"lock_text": False}},
    ),
    ("logging.wandb_project", {"logging": {"wandb_project": "p"}}, {"logging": {"wandb": "offline"}}),
    ("logging.swanlab_project", {"logging": {"swanlab_project": "p"}}, {"logging": {"swanlab": "offline"}}),
    (
        "logging.mlflow_experiment",
        {"logging": {"mlflow_experiment": "p"}},
        {"logging": {"mlflow": "http://localhost:5000"}},
    ),
    (
        "data.storage.region",
        {"data": {"train": ("0.tar",), "format": "webdataset", "storage": {"region": "eu"}}},
        {"data": {"train": ("s3://bucket/0.tar",)}},
    ),
    (
        "health.preflight_s",
        {"health": {"preflight": False, "preflight_s": 2.0}},
        {"health": {"preflight": True}},
    ),
    ("health.non_finite_in_a_row", {"health": {"non_finite_in_a_row": 2}}, {"model": {"precision": "fp16"}}),
    ("stack.torch", {"stack": {"torch": "2.13.0"}}, {"image": {"tag": "ours/clip:1"}}),
    ("image.cuda_home", {"image": {"cuda_home": "/c", "tag": "ours/clip:1"}}, {"image": {"toolkit": "base"}}),
    ("resources.mem_gb_per_gpu", {"resources": {"mem_gb_per_gpu": 9.0}}, {"slurm": {"partition": "gpu"}}),
]
"""A key, a job in which it has no effect, and what more of a job gives it one."""


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = dict(one)
    for key, value in other.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and key in both else value
    return both


@pytest.mark.parametrize(("key", "without", "more"), CASES)
def test_a_key_is_named_only_while_it_has_no_effect(
    key: str, without: dict[str, Any], more: dict[str, Any]
) -> None:
    assert key in unused(**without)
    used = merged(without, more)
    if more.get("data", {}).get("format") == "synthetic":
        used["data"].pop("train")
    elif more.get("data", {}).get("train"):
        used["data"].pop("format", None)
    assert key not in unused(**used)


def test_every_condition_has_a_case() -> None:
    declared = {condition for _, field in walk(Job) for condition in conditions_of(field)}
    reasons = {condition.why_not for condition in (*declared, *BY_LAUNCHER.values())}
    assert {".".join(key) for key, _ in walk(Job)} >= BY_LAUNCHER.keys()
    tested = [job_of(**without) for _, without, _ in CASES]
    assert len({why for job in tested for _, why in unused_keys(job)}) >= len(reasons) > 45


def test_each_key_is_named_once_with_the_first_reason() -> None:
    named = unused(
        comm={"nccl": {"ib_hca": "mlx5_0"}, "torch": {"device_backend": "gloo"}}, resources={"device": "cpu"}
    )
    assert named == {"comm.nccl.ib_hca": "[resources] asks for the CPU"}


@pytest.mark.parametrize("preset", preset_names())
def test_presets_set_no_key_without_effect(preset: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(job_text(Wishes(preset)))
    assert list(unused_keys(load_job(path))) == []


def test_a_file_that_clipship_wrote_sets_all_keys_and_only_those_that_differ_count(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    job = job_of(recovery={"backoff_s": 1.0, "same_fault_limit": 2})
    assert [keys for keys, _ in unused_keys(job)] == [("recovery.same_fault_limit", "recovery.backoff_s")]
    path.write_text(dump_job(job))
    assert [keys for keys, _ in unused_keys(load_job(path))] == [("recovery.backoff_s",)]


def test_check_shows_keys_of_one_reason_on_one_line() -> None:
    job = job_of(data=SYNTHETIC, recovery={"backoff_s": 1.0, "keep_in_memory": True})
    lines = describe(job, 1, 1024, local=True).splitlines()
    assert lines[-1] == (
        "no effect   recovery.backoff_s, recovery.keep_in_memory: recovery.max_restarts is 0, so the first "
        "fault ends the run"
    )
