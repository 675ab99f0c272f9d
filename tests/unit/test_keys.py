"""Every key of the job file says what it is where it is declared.

Paths, mounts and the resume rule follow from the declaration.
"""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_line import Table, clipship, render
from tests.support.faults import ROWS, Fault, Row
from tests.support.goldens import apply, check, difference, read, write
from tests.support.kubernetes_jobs import CASES as MANIFESTS
from tests.support.kubernetes_jobs import kubernetes_job
from tests.support.slurm_jobs import CASES as SCRIPTS
from tests.support.slurm_jobs import slurm_table
from tests.unit.test_image_dockerfile import CASES as DOCKERFILES
from tests.unit.test_image_dockerfile import image_job
from trainer.config import Job
from trainer.config.keys import conditions_of, walk
from trainer.config.loader import dump_job, job_from_table, load_job, own_keys
from trainer.errors import InputError
from trainer.plan.unused_keys import BY_LAUNCHER, unused_keys

SCHEMA = json.loads(clipship("explain", "", "--json").out)


def marked(table: dict[str, Any], mark: str, before: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys whose entry in the schema has such a mark, with their entries."""
    for name, its in table["properties"].items():
        if mark in its:
            yield before + name, its
        if "properties" in its:
            yield from marked(its, mark, f"{before}{name}.")


PATHS = dict(marked(SCHEMA, "x-path"))
EXAMPLES = {
    "model.teacher": "models/teacher.json",
    "model.name": "own.json",
    "model.pretrained": "weights.pt",
    "slurm.image": "./clip.sif",
    "slurm.python": "bin/python",
    "slurm.output": "logs/%j.out",
}
NAMES = {"eval.class_names", "eval.templates"}
"""Keys whose lists are no paths."""
NEEDED = {
    "model.teacher": {"teacher_pretrained": "openai"},
    "model.teacher_pretrained": {"teacher": "ViT-B-32"},
    "slurm.image_dir": {"container": "pyxis"},
    "slurm.container_binary": {"container": "apptainer", "image": "/clip.sif"},
}
"""Values of its section without which a key is refused."""


def job_in(folder: Path, key: str, value: object) -> Job:
    """A job file there in which this key alone is set, and those that it needs."""
    table: dict[str, Any] = {
        "name": "n",
        "data": {"format": "synthetic"},
        "optim": {"global_batch_size": 8, "steps": 1},
    }
    if key == "data.train":
        table["data"] = {}
    if key == "model.targets":
        table["data"] = {"train": "/a.tar"}
    *sections, name = key.split(".")
    inner = table
    for section in sections:
        inner = inner.setdefault(section, {})
    inner.update({**NEEDED.get(key, {}), name: value})
    path = folder / "job.toml"
    path.write_text(tomli_w.dumps(table))
    return load_job(path)


def value_of(section: Any, key: str) -> Any:
    """The value of a dotted key."""
    for name in key.split("."):
        section = getattr(section, name)
    return section


@pytest.mark.parametrize("key", PATHS)
def test_a_relative_path_starts_at_the_job_files_folder(key: str, tmp_path: Path) -> None:
    text = EXAMPLES.get(key, "some/place")
    listed = isinstance(value_of(job_in(tmp_path, "seed", 1), key), tuple) and key not in NAMES
    found = value_of(job_in(tmp_path, key, [text] if listed else text), key)
    assert found == ((str(tmp_path / text),) if isinstance(found, tuple) else str(tmp_path / text))


@pytest.mark.parametrize("key", ["model.pretrained", "eval.suite.folders"])
def test_an_address_is_no_path(key: str, tmp_path: Path) -> None:
    listed = isinstance(value_of(job_in(tmp_path, "seed", 1), key), tuple)
    said = rf"{key}: s3://bucket/some is an address, and this key takes a path"
    with pytest.raises(InputError, match=said):
        job_in(tmp_path, key, ["s3://bucket/some"] if listed else "s3://bucket/some")
    job_in(tmp_path, "seed", 1)
    assert (
        f"{key}: s3://bucket/some is an address"
        in clipship("check", tmp_path / "job.toml", "--set", f"{key}=s3://bucket/some").err
    )


def test_keys_that_decide_what_is_computed_may_not_change() -> None:
    """A new section or key is part of the run's identity unless its declaration says otherwise."""
    may = {key for key, its in marked(SCHEMA, "x-resumed-run-may-change") if its["x-resumed-run-may-change"]}
    assert not may & {"seed", "data.train", "model.name", "optim.lr", "optim.global_batch_size"}
    assert {"data.workers", "comm.backend", "slurm.time", "timeouts.step_s", "logging.runs"} <= may


# `clipship check` names the keys that a job sets without effect.

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


# Each key of a cluster's sections is in a golden, and changes what is rendered.
# So shellcheck, hadolint and the API server, which take the goldens, meet every key.

OWN_TEXTS = {
    "slurm": re.compile(r"<<'(END_OF_JOB\w*)'\n.*?\n\1\n", re.DOTALL),
    "kubernetes": re.compile(r"^  job\.toml: .*?(?=^  \w|^---$)", re.DOTALL | re.MULTILINE),
    "dockerfile": re.compile(r"^.*org\.clipship\.job=.*$", re.MULTILINE),
}
"""Part of each text that has every key of the job in any case."""
SECTIONS = {
    "slurm": ("slurm",),
    "kubernetes": ("kubernetes",),
    "kubernetes.patch": ("kubernetes",),
    "resources": ("slurm", "kubernetes"),
    "image": ("dockerfile", "kubernetes"),
    "image.site": ("dockerfile",),
    "image.mirrors": ("dockerfile",),
    "stack": ("dockerfile",),
}
"""Sections with the texts in which their keys have an effect."""
KEYS = [
    f"{section}.{key}"
    for section in SECTIONS
    for key in json.loads(clipship("explain", section, "--json").out)["properties"]
]
IN_THE_CONTEXT = "the build's context has it, and the Dockerfile is the same for any of these"
WITHOUT_TEXT = {
    "resources.gpu": "`clipship check` estimates with it",
    "resources.gpu_rates": "`clipship check` estimates with it",
    "resources.bind_cpus": "the rank reads it from its job file",
    "slurm.image_dir": "`clipship submit` puts the file that is there into slurm.image",
    "kubernetes.retries": "the pods read it from their job file",
    "kubernetes.workers_ready_s": "the pods read it from their job file",
    "stack.driver": "it is compared with the table",
    "stack.cuda": "it is compared with the table; of a base's torch the build's last step compares it",
    "stack.open_clip": "one value is allowed, which is the default",
    "image.compression": "it is a form in which layers are pushed",
    "image.mirrors.pip": IN_THE_CONTEXT,
    "image.mirrors.apt_security": IN_THE_CONTEXT,
    "image.site.wheelhouse": IN_THE_CONTEXT,
}
"""Keys that a golden has, too, but that change nothing in the text; with the reason."""


@functools.cache
def tables(kind: str) -> list[Table]:
    """Returns what the jobs of the goldens of a kind say themselves."""
    if kind == "slurm":
        return [slurm_table(**sections) for sections in SCRIPTS.values()]
    if kind == "kubernetes":
        return [own_keys(kubernetes_job(**sections)) for sections in MANIFESTS.values()]
    return [own_keys(image_job(**sections)) for sections in DOCKERFILES.values()]


def without(table: Table, path: list[str]) -> Table | None:
    """Returns the table without the key; None if it has none."""
    first, *rest = path
    if first not in table:
        return None
    if not rest:
        return {key: value for key, value in table.items() if key != first}
    inner = without(table[first], rest)
    return None if inner is None else {**table, first: inner}


def pairs(key: str) -> Iterator[tuple[str, Table, Table]]:
    """Yields each job of a golden that has the key, and the same job without it."""
    for kind in SECTIONS[key.rpartition(".")[0]]:
        for table in tables(kind):
            if (other := without(table, key.split("."))) is not None:
                yield kind, table, other


def text(kind: str, table: Table) -> str:
    """Returns what the job's table becomes, without the job itself; the problem if it is refused."""
    said = render(kind, table)
    return OWN_TEXTS[kind].sub("", said.out) if said.code == 0 else said.err


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_in_a_golden_and_changes_what_is_rendered(key: str) -> None:
    with_key = list(pairs(key))
    assert with_key, f"no golden has {key}"
    changes = any(text(kind, table) != text(kind, other) for kind, table, other in with_key)
    assert changes is (key not in WITHOUT_TEXT)


# What tests stand on: goldens, which keep each text to the byte, and the table of faults.

LINES = st.lists(
    st.sampled_from(["", "a", "b", " a", "-a", "+a", "@@ a", "--- a", "\r", "\u2028"]), max_size=12
)
BASE = "".join(f"line {number}\n" for number in range(20))
TEXTS = {
    "base.txt": BASE,
    "a/more.txt": BASE.replace("line 7\n", "line 7\nmore\n"),
    "a/less.txt": BASE.removesuffix("\n"),
    "other.txt": "one\ntwo\n",
}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


@given(LINES, LINES)
def test_a_difference_makes_exactly_the_new_lines(old: list[str], new: list[str]) -> None:
    assert apply(old, list(difference(old, new))) == new


def test_what_is_near_is_a_difference_that_names_no_line_numbers(tmp_path: Path) -> None:
    (tmp_path / "base.txt").touch()
    write(tmp_path, TEXTS)
    assert files(tmp_path).keys() == {"base.txt", "other.txt", "a/more.txt.diff", "a/less.txt.diff"}
    assert (tmp_path / "a/more.txt.diff").read_text() == "--- base.txt\n+++ a/more.txt\n@@ line 7\n+more\n"
    assert {name: read(tmp_path, name) for name in TEXTS} == TEXTS


def test_writing_again_changes_nothing_and_writing_some_keeps_the_others(tmp_path: Path) -> None:
    write(tmp_path, TEXTS)
    written = files(tmp_path)
    write(tmp_path, TEXTS)
    assert files(tmp_path) == written
    changed = {"base.txt": BASE.replace("line 3", "line three")}
    write(tmp_path, changed)
    assert {name: read(tmp_path, name) for name in TEXTS} == TEXTS | changed


def test_every_changed_character_fails_and_shows_what_differs(tmp_path: Path) -> None:
    write(tmp_path, TEXTS)
    for name, text in TEXTS.items():
        check(tmp_path, name, text)
        for place in range(len(text)):
            with pytest.raises(pytest.fail.Exception, match="make goldens"):
                check(tmp_path, name, f"{text[:place]}x{text[place + 1 :]}")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)@@.*\n-two\n\+2\n"):
        check(tmp_path, "other.txt", "one\n2\n")


def test_a_golden_that_is_missing_or_does_not_fit_says_what_writes_it(tmp_path: Path) -> None:
    (tmp_path / "base.txt").touch()
    write(tmp_path, TEXTS)
    (tmp_path / "base.txt").write_text("something else\n")
    for name in ("a/more.txt", "new.txt"):
        with pytest.raises(pytest.fail.Exception, match="`make goldens` writes it"):
            check(tmp_path, name, "text")


# The table of faults: a row needs a test in which the run ends and one in which it goes on


NEEDS = "not tried: needs sshd"


@pytest.mark.parametrize(
    ("ends", "goes_on", "fault", "passed"),
    [
        (["passed"], ["passed"], Fault(), True),
        (["passed"], [], Fault(), False),
        (["passed"], ["passed", "failed"], Fault(), False),
        (["passed"], [], Fault(never_goes_on="a reason"), True),
        ([], ["passed"], Fault(never_ends="a reason"), True),
        ([], [], Fault(never_ends="a reason"), False),
    ],
)
def test_a_row_passes_if_both_columns_have_a_passed_test_or_a_reason(
    ends: list[str], goes_on: list[str], fault: Fault, passed: bool
) -> None:
    row = Row(fault, ends, goes_on)
    assert row.passed is passed
    assert row.line("a row").startswith("ok " if passed else "NOT OK ")


@pytest.mark.parametrize(
    ("ends", "goes_on", "state"),
    [
        (["skipped"], ["skipped"], "- "),
        (["passed"], ["skipped", "skipped"], "- "),
        (["passed"], ["passed", "skipped"], "ok "),
        (["failed"], ["skipped"], "NOT OK "),
        (["skipped"], [], "NOT OK "),
    ],
)
def test_a_column_whose_tests_were_all_skipped_was_not_tried(
    ends: list[str], goes_on: list[str], state: str
) -> None:
    row = Row(Fault(), ends, goes_on, needs={"needs sshd"})
    line = row.line("a row")
    assert line.startswith(state)
    assert line.endswith(NEEDS) is ("passed" not in ends or "passed" not in goes_on)
    assert row.passed is (state == "ok ")
    assert row.failed is (state == "NOT OK ")


def test_no_row_lacks_both_columns() -> None:
    assert not [name for name, fault in ROWS.items() if fault.never_ends and fault.never_goes_on]
