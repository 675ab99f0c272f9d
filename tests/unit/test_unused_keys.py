"""`clipship check` names the keys that a job sets without effect."""

from pathlib import Path

import pytest

from trainer.config import Job
from trainer.config.keys import conditions_of, walk
from trainer.config.loader import dump_job, job_from_table, load_job
from trainer.plan.unused_keys import BY_LAUNCHER, unused_keys

SYNTHETIC = "data.train= data.format=synthetic"
SHARDS = "data.train=a.tar data.format=auto"


def job_of(*words: str) -> Job:
    """A job of shards with these words of `--set`."""
    job = {"name": "run", "data": {"train": ["a.tar"]}, "optim": {"global_batch_size": 4, "steps": 2}}
    return job_from_table(job, "a test", [word for each in words for word in each.split()])


def unused(*words: str) -> set[str]:
    return {key for keys, _ in unused_keys(job_of(*words)) for key in keys}


RESTARTS, IN_MEMORY = "recovery.max_restarts=1", "recovery.keep_in_memory"
CASES = [
    ("image.mirrors.registry=a.b", "image.tag=x:1 image.base=nvcr.io/x/y:1", "image.base=docker.io/x/y:12"),
    ("optim.caption_weight=1.0", "", "optim.loss=coca"),
    ("optim.contrast_weight=2.0", "", "optim.loss=coca"),
    ("optim.distill_weight=2.0", "", "model.teacher=ViT-B-32 model.teacher_pretrained=openai"),
    ("optim.distill_temperature=0.07", "", "model.teacher=ViT-B-32 model.teacher_pretrained=openai"),
    ("model.init_keep_positions=20", "", "model.init=weights.pt"),
    ("data.cache_gb=8", "", "data.cache=/local"),
    ("checkpoint.copy_wait_s=9.0", "", "checkpoint.copy_to=/far"),
    ("data.read_ahead_mb=8", SYNTHETIC, SHARDS),
    ("data.synthetic_samples=8", "", SYNTHETIC),
    ("data.on_bad_sample=fail", SYNTHETIC, SHARDS),
    ("data.max_image_pixels=9", SYNTHETIC, "eval.retrieval=b.tar"),
    ('data.image_key=["x"]', "data.train=a.csv", "eval.zero_shot=b"),
    ("data.caption_key=x", "data.train=a.csv", "eval.retrieval=b.tar"),
    ("data.caption_choice=first", "data.train=a.csv", "data.train=a.tar"),
    ("data.caption_weights=[1.0]", SYNTHETIC, "eval.retrieval=b.tar"),
    (
        "data.scores_by=json:uid",
        'data.filters=["a>1"]',
        'data.scores=["s.txt"] data.filters=["scores:listed==true"]',
    ),
    ("data.group_by=json:g", "", "optim.positives=groups"),
    ('data.filters=["a>1"]', SYNTHETIC, SHARDS),
    ("data.row_group_cache_mb=9", "", "eval.retrieval=b.parquet"),
    ("data.augment.rand_augment_magnitude=5", "", "data.augment.rand_augment_ops=1"),
    ("data.augment.color_jitter=[0.1,0.1,0.1,0.1]", "", "data.augment.color_jitter_prob=0.5"),
    ("data.augment.erase_count=2", "", "data.augment.erase_prob=0.5"),
    ("data.encoding=gb18030", SYNTHETIC, "eval.retrieval=b.csv"),
    ("data.image_column=i", "", "eval.retrieval=b.csv"),
    ("data.caption_column=c", "data.train=a.csv data.caption_template={t}", "data.caption_template=[]"),
    ("data.separator=;", "", "eval.retrieval=b.csv"),
    ("data.index=i", "data.train=a.csv", "data.train=a.tar"),
    ("data.block_samples=8", "data.train=a.parquet", "data.train=a.tar"),
    ("data.read_ahead_mb=8", "data.train=a.arrow", "data.train=a.parquet"),
    ("data.stream_samples=9", "", "data.train=pipe:a"),
    ("data.max_bad_share=0.5", "data.on_bad_sample=fail", "data.train=a.tar data.on_bad_sample=skip"),
    ("eval.batch_size=8", "", "eval.retrieval=b.tar"),
    ("eval.batch_size=8", "", "eval.suite.root=b"),
    ('eval.templates=["{}"]', "", 'eval.suite.folders=["b"]'),
    ('eval.class_names=["c"]', "eval.retrieval=b.tar", "eval.zero_shot=b.tar"),
    ("timeouts.eval_s=8.0", "", "eval.retrieval=b.tar"),
    ('eval.templates=["{}"]', "eval.retrieval=b.tar", "eval.zero_shot=b"),
    ("eval.class_key=n", "eval.zero_shot=b", 'eval.zero_shot=b.tar eval.class_names=["c"]'),
    ("model.cuda_graphs=true", "resources.accelerator=rocm", "resources.accelerator=cuda"),
    ("model.cudnn_benchmark=true", "resources.device=cpu", "resources.device=gpu"),
    ("model.cudnn_benchmark=true", "comm.deterministic=true", "comm.deterministic=false"),
    ("resources.gpu=H100", "resources.gpus_per_node=0", "resources.gpus_per_node=1"),
    ("comm.torch.bucket_mb=1.0", "comm.backend=fsdp", "comm.backend=torch"),
    ("comm.torch.bucket_mb=1.0", "comm.deterministic=true", "comm.deterministic=false"),
    ("comm.torch.device_backend=gloo", "comm.backend=horovod", "comm.backend=fsdp"),
    ("comm.fsdp.shard_degree=node", "", "comm.backend=fsdp"),
    ("comm.horovod.hierarchical_allreduce=true", "comm.backend=horovod", "comm.launcher=mpirun"),
    ("comm.horovod.cycle_ms=2.0", "", "comm.backend=horovod"),
    ("comm.nccl.ib_hca=mlx5_0", "comm.torch.device_backend=gloo", "comm.backend=horovod"),
    ("recovery.backoff_s=1.0", "", "recovery.max_restarts=1"),
    ("recovery.keep_every_steps=2", f"{RESTARTS} {IN_MEMORY}=false", f"{IN_MEMORY}=true"),
    ("optim.beta2=0.9", "optim.optimizer=sgd", "optim.optimizer=lion"),
    ("optim.eps=1e-8", "optim.optimizer=lion", "optim.optimizer=adamw"),
    ("model.lora_alpha=8.0", "", "model.lora_rank=4 model.pretrained=openai"),
    ("model.lora_towers=text", "", "model.lora_rank=4 model.pretrained=openai"),
    ('model.lora_targets=["*.attn.*"]', "", "model.lora_rank=4 model.pretrained=openai"),
    ("optim.ema_from_step=1", "", "optim.ema_decay=0.99"),
    ('optim.no_decay=["*pos*"]', "optim.weight_decay=0.0", "optim.weight_decay=0.1"),
    ("optim.image_lr=1e-4", "model.lock_image=true", "model.lock_image_unlocked_groups=1"),
    ("optim.text_layer_decay=0.9", "model.lock_text=true", "model.lock_text=false"),
    ("logging.wandb_project=p", "", "logging.wandb=offline"),
    ("logging.swanlab_project=p", "", "logging.swanlab=offline"),
    ("logging.mlflow_experiment=p", "", "logging.mlflow=http://localhost:5000"),
    ("data.storage.region=eu", "data.train=0.tar data.format=webdataset", "data.train=s3://bucket/0.tar"),
    ("health.preflight_s=2.0", "health.preflight=false", "health.preflight=true"),
    ("health.non_finite_in_a_row=2", "", "model.precision=fp16"),
    ("stack.torch=2.13.0", "", "image.tag=ours/clip:1"),
    ("image.cuda_home=/c", "image.tag=ours/clip:1", "image.toolkit=base"),
    ("resources.mem_gb_per_gpu=9.0", "", "slurm.partition=gpu"),
]
"""A key with its value, what it has no effect beside, and what more of a job gives it one."""


@pytest.mark.parametrize(("key", "without", "more"), CASES)
def test_a_key_is_named_only_while_it_has_no_effect(key: str, without: str, more: str) -> None:
    name = key.partition("=")[0]
    assert name in unused(key, without)
    assert name not in unused(key, without, more)


def test_every_condition_has_a_case() -> None:
    declared = {condition for _, field in walk(Job) for condition in conditions_of(field)}
    reasons = {condition.why_not for condition in (*declared, *BY_LAUNCHER.values())}
    assert {".".join(key) for key, _ in walk(Job)} >= BY_LAUNCHER.keys()
    tested = [job_of(key, without) for key, without, _ in CASES]
    assert len({why for job in tested for _, why in unused_keys(job)}) >= len(reasons) > 45


def test_a_file_that_clipship_wrote_sets_all_keys_and_only_those_that_differ_count(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    job = job_of("recovery.backoff_s=1.0 recovery.same_fault_limit=2")
    assert [keys for keys, _ in unused_keys(job)] == [("recovery.same_fault_limit", "recovery.backoff_s")]
    path.write_text(dump_job(job))
    assert [keys for keys, _ in unused_keys(load_job(path))] == [("recovery.backoff_s",)]
