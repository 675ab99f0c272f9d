"""Command lines of open_clip_train become jobs that train the same; the table is that of its real parser."""

import argparse
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any
from unittest import mock

import open_clip
import pytest
import torch
from timm.data.naflex_dataset import calculate_naflex_batch_size

from tests.support.command_line import Said, clipship
from tests.support.text_towers import make_tower
from trainer.config import Eval, Job
from trainer.config.learning_rate import learning_rate
from trainer.config.loader import load_job
from trainer.evaluate.inputs import class_names, templates
from trainer.from_open_clip.read import read
from trainer.from_open_clip.table import FLAGS, flags_of
from trainer.from_open_clip.table_4 import NOT_SUPPORTED
from trainer.model.optimizer import decays

SHARDS = "--train-data cc3m/{0000..0331}.tar --train-num-samples 2905954"


def their_actions() -> dict[str, argparse.Action]:
    """The flags of the parser that open_clip_train makes."""
    from open_clip_train.params import parse_args

    stopped = mock.patch.object(
        argparse.ArgumentParser, "parse_args", autospec=True, side_effect=InterruptedError
    )
    with stopped as asked, pytest.raises(InterruptedError):
        parse_args([])
    return {action.option_strings[0]: action for action in asked.call_args.args[0]._actions[1:]}


def translated(arguments: str | list[str], *options: object) -> Said:
    """What the command says of a command line, whose flags may be left out."""
    words = shlex.split(arguments) if isinstance(arguments, str) else arguments
    return clipship("from-open-clip", "--partial", *options, "--", *words)


def job_of(arguments: str, tmp_path: Path, gpus: int = 1) -> Job:
    """The job, read from a file as a user would."""
    path = tmp_path / "job.toml"
    path.write_text(translated(arguments, "--gpus", gpus).out)
    return load_job(path)


def table_of(arguments: str, gpus: int | None = 8, release: str | None = None) -> dict[str, Any]:
    """Returns the values of the job file by dotted key."""
    options = [*(["--gpus", gpus] if gpus else []), *(["--release", release] if release else [])]
    return dict(_dotted(tomllib.loads(translated(arguments, *options).out)))


def _dotted(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


IMPORTED = "4" if hasattr(open_clip, "create_task") else "3.3"
"""Release whose parser is tried: the installed one, or that of a checkout that is first on the path."""
COUNTS = {"3.3": 90, "4": 142}


def test_every_flag_of_the_real_parser_has_a_row_that_reads_it_alike() -> None:
    real = their_actions()
    rows = {flag.name: flag for flag in flags_of(IMPORTED)}
    assert set(rows) == set(real)
    assert len(rows) == COUNTS[IMPORTED]
    for name, action in real.items():
        if rows[name] in NOT_SUPPORTED:
            continue
        takes = rows[name].takes_in(IMPORTED)
        assert rows[name].default_in(IMPORTED) == action.default, name
        assert [rows[name].also] * bool(rows[name].also) == action.option_strings[1:], name
        assert takes.get("nargs") == (None if action.nargs == 0 else action.nargs), name
        stores = ("store_true", "store_false") if action.nargs == 0 else (None, "append")
        assert takes.get("action") in stores, name
        assert (takes.get("type") or str) == (action.type or str), name
        assert set(takes.get("choices") or []) == set(action.choices or []), name


BASE = f"{SHARDS} --model ViT-B-32"
NAFLEX = f"{SHARDS} --model naflex_ViT-B-16 --use-naflex"
COOLDOWN = "--lr-scheduler const-cooldown --epochs-cooldown 2"
EFFECTS = {
    "--train-data": "--train-data other.tar --train-num-samples 2905954 --model ViT-B-32",
    "--train-data-upsampling-factors": f"{BASE} --train-data-upsampling-factors 2",
    "--train-num-samples": (
        "--train-data cc3m/{0000..0331}.tar --train-num-samples 100000000 --model ViT-B-32"
    ),
    "--dataset-type": f"{BASE} --dataset-type csv",
    "--csv-separator": f"{BASE} --val-data v.csv --csv-separator ;",
    "--csv-img-key": f"{BASE} --val-data v.csv --csv-img-key i",
    "--csv-caption-key": f"{BASE} --val-data v.csv --csv-caption-key c",
    "--workers": f"{BASE} --workers 8",
    "--seed": f"{BASE} --seed 3",
    "--opt": f"{BASE} --opt timm/lion --lr 5e-4 --beta1 0.9 --beta2 0.98",
    "--momentum": f"{BASE} --opt timm/nesterovw --lr 5e-4 --momentum 0.8",
    "--aug-cfg": f"{BASE} --aug-cfg scale=(0.5,1)",
    "--image-mean": f"{BASE} --image-mean 0.5 0.4 0.3",
    "--image-std": f"{BASE} --image-std 0.5",
    "--image-interpolation": f"{BASE} --image-interpolation bilinear",
    "--image-resize-mode": f"{BASE} --image-resize-mode squash",
    "--model": f"{SHARDS} --model ViT-B-16",
    "--pretrained": f"{BASE} --pretrained openai",
    "--pretrained-image": f"{SHARDS} --model convnext_base --pretrained-image",
    "--cache-dir": f"{BASE} --cache-dir /cache",
    "--precision": f"{BASE} --precision amp_bf16",
    "--lock-image": f"{BASE} --lock-image",
    "--lock-image-unlocked-groups": f"{BASE} --lock-image --lock-image-unlocked-groups 2",
    "--lock-text": f"{BASE} --lock-text",
    "--lock-text-unlocked-layers": f"{BASE} --lock-text --lock-text-unlocked-layers 2",
    "--force-context-length": f"{BASE} --force-context-length 32",
    "--force-image-size": f"{BASE} --force-image-size 256",
    "--force-patch-dropout": f"{BASE} --force-patch-dropout 0.5",
    "--grad-checkpointing": f"{BASE} --grad-checkpointing",
    "--use-bn-sync": f"{BASE} --use-bn-sync",
    "--force-quick-gelu": f"{BASE} --force-quick-gelu",
    "--torchcompile": f"{BASE} --torchcompile",
    "--siglip": f"{BASE} --siglip",
    "--distill-model": f"{BASE} --distill-model ViT-B-32 --distill-pretrained openai",
    "--distill-pretrained": f"{BASE} --distill-pretrained openai --distill-model ViT-B-32",
    "--coca-caption-loss-weight": f"{BASE} --model coca_ViT-B-32 --coca-caption-loss-weight 1",
    "--coca-contrastive-loss-weight": f"{BASE} --model coca_ViT-B-32 --coca-contrastive-loss-weight 3",
    "--batch-size": f"{BASE} --batch-size 32",
    "--accum-freq": f"{BASE} --accum-freq 4",
    "--epochs": f"{BASE} --epochs 64",
    "--lr": f"{BASE} --lr 1e-3",
    "--beta1": f"{BASE} --beta1 0.8",
    "--beta2": f"{BASE} --beta2 0.95",
    "--eps": f"{BASE} --eps 1e-7",
    "--wd": f"{BASE} --wd 0.1",
    "--warmup": f"{BASE} --warmup 7",
    "--skip-scheduler": f"{BASE} --skip-scheduler",
    "--lr-scheduler": f"{BASE} --lr-scheduler const",
    "--epochs-cooldown": f"{BASE} {COOLDOWN}",
    "--lr-cooldown-end": f"{BASE} {COOLDOWN} --lr-cooldown-end 1e-6",
    "--lr-cooldown-power": f"{BASE} {COOLDOWN} --lr-cooldown-power 0.5",
    "--grad-clip-norm": f"{BASE} --grad-clip-norm 2",
    "--val-data": f"{BASE} --val-data v.tar",
    "--val-frequency": f"{BASE} --val-data v.tar --val-frequency 3",
    "--imagenet-val": f"{BASE} --imagenet-val /in --batch-size 32",
    "--zeroshot-frequency": f"{BASE} --imagenet-val /in --zeroshot-frequency 3",
    "--save-frequency": f"{BASE} --save-frequency 5",
    "--resume": f"{BASE} --resume epoch_3.pt",
    "--remote-sync": f"{BASE} --remote-sync s3://bucket/runs",
    "--delete-previous-checkpoint": f"{BASE} --delete-previous-checkpoint",
    "--logs": f"{BASE} --logs /runs",
    "--name": f"{BASE} --name x",
    "--report-to": f"{BASE} --report-to tensorboard",
    "--wandb-project-name": f"{BASE} --report-to wandb --wandb-project-name p",
    "--log-every-n-steps": f"{BASE} --log-every-n-steps 7",
    "--device": f"{BASE} --device cpu",
    "--dist-backend": f"{BASE} --dist-backend gloo",
    "--horovod": f"{BASE} --horovod",
    "--ddp-static-graph": f"{BASE} --ddp-static-graph",
    "--image-key": f"{BASE} --image-key png;jpg",
    "--max-image-pixels": f"{BASE} --max-image-pixels 0",
    "--text-key": f"{BASE} --text-key caption",
    "--json-text-key": f"{BASE} --json-text-key caption;alt",
    "--json-text-key-probs": f"{BASE} --json-text-key caption;alt --json-text-key-probs 3 1",
    "--text-layer-decay": f"{BASE} --text-layer-decay 0.65",
    "--image-layer-decay": f"{BASE} --visual-layer-decay 0.75",
    "--wd-exclude": f"{BASE} --wd-exclude visual.proj* *.gain",
    "--fsdp": f"{BASE} --fsdp",
    "--fsdp-no-reshard-after-forward": f"{BASE} --fsdp --fsdp-no-reshard-after-forward",
    "--use-naflex": NAFLEX,
    "--naflex-patch-sizes": f"{NAFLEX} --naflex-patch-sizes 16 24",
    "--naflex-patch-size-probs": f"{NAFLEX} --naflex-patch-sizes 16 24 --naflex-patch-size-probs 3 1",
    "--naflex-seq-lens": f"{NAFLEX} --naflex-seq-lens 256 128",
    "--naflex-seq-len-probs": f"{NAFLEX} --naflex-seq-lens 256 128 --naflex-seq-len-probs 3 1",
    "--naflex-max-tokens-per-batch": f"{NAFLEX} --naflex-max-tokens-per-batch 4096",
    "--naflex-batch-divisor": f"{NAFLEX} --naflex-batch-divisor 1",
}
"""A command line in which the flag sets its keys."""
OTHERS = {
    "--train-data": {"data.train"},
    "--dataset-type": {"optim.epochs", "eval.every_steps", "checkpoint.every_steps"}
    | {"data.image_column", "data.caption_column", "data.separator", "optim.steps"},
    "--model": {"name"},
    "--distill-model": {"model.teacher_pretrained"},
    "--distill-pretrained": {"model.teacher"},
    "--coca-caption-loss-weight": {"name", "model.name", "optim.loss"},
    "--coca-contrastive-loss-weight": {"name", "model.name", "optim.loss"},
    "--opt": {"optim.lr", "optim.beta1", "optim.beta2"},
    "--momentum": {"optim.lr", "optim.optimizer", "optim.no_decay"},
    "--pretrained-image": {"name", "model.name", "optim.eps", "optim.beta2"},
    "--batch-size": {"optim.steps", "checkpoint.every_steps"},
    "--accum-freq": {"optim.steps", "checkpoint.every_steps"},
    "--train-num-samples": {"checkpoint.every_steps"},
    "--workers": {"optim.steps", "checkpoint.every_steps"},
    "--imagenet-val": {"optim.global_batch_size", "optim.max_batch_size_per_gpu", "optim.steps"}
    | {"checkpoint.every_steps", "eval.every_steps"},
    "--val-data": {"eval.every_steps"},
    "--val-frequency": {"eval.retrieval"},
    "--zeroshot-frequency": {"eval.zero_shot", "eval.class_names", "eval.templates"},
    "--csv-separator": {"eval.retrieval", "eval.every_steps", "data.image_column", "data.caption_column"},
    "--csv-img-key": {"eval.retrieval", "eval.every_steps", "data.separator", "data.caption_column"},
    "--csv-caption-key": {"eval.retrieval", "eval.every_steps", "data.separator", "data.image_column"},
    "--wandb-project-name": {"logging.wandb"},
    "--epochs-cooldown": {"optim.schedule"},
    "--lr-cooldown-end": {"optim.schedule", "optim.cooldown_share"},
    "--lr-cooldown-power": {"optim.schedule", "optim.cooldown_share"},
    "--lock-image-unlocked-groups": {"model.lock_image"},
    "--lock-text-unlocked-layers": {"model.lock_text"},
    "--json-text-key": {"data.caption_lines"},
    "--json-text-key-probs": {"data.caption_key", "data.caption_lines"},
    "--fsdp-no-reshard-after-forward": {"comm.backend"},
    **{
        name: {"name", "model.name", "model.image_patches"}
        | {"model.image_tokens", "model.image_tokens_weights"}
        | {"optim.global_batch_size", "optim.max_batch_size_per_gpu", "optim.max_image_tokens_per_gpu"}
        | {"optim.steps", "checkpoint.every_steps"}
        for name in FLAGS
        if "naflex" in name
    },
}
"""Keys that these command lines change as well, by other flags in them or as a consequence."""


def test_every_flag_with_keys_is_tried() -> None:
    assert set(EFFECTS) == {name for name, flag in FLAGS.items() if flag.fate == "key"}


@pytest.mark.parametrize("name", EFFECTS)
def test_a_flag_sets_its_keys_and_no_others(name: str, tmp_path: Path) -> None:
    release = FLAGS[name].release or None
    before, after = table_of(BASE, release=release), table_of(EFFECTS[name])
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert changed & set(FLAGS[name].keys)
    assert changed <= set(FLAGS[name].keys) | OTHERS.get(name, set())
    job_of(EFFECTS[name], tmp_path, 8)


VALUES: dict[Any, str] = {int: "3", float: "0.5", str: "x", None: "x=1"}


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if not flag.keys])
def test_a_flag_without_keys_is_named_with_its_reason(name: str) -> None:
    row = FLAGS[name]
    choices = [each for each in row.takes.get("choices", ()) if each != row.takes.get("default")]
    value = (choices or [VALUES[row.takes.get("type")]])[-1]
    if str(row.takes.get("action")).startswith("store_"):
        value = ""
    contexts = ("--lock-image", "--lock-text", "--remote-sync r")
    context = next((flag for flag in contexts if name.startswith(f"{flag.split()[0]}-")), "")
    said = translated(f"{BASE} {context} {name} {value}")
    refused = row.fate in ("not supported yet", "not wanted") and not row.harmless
    fate = f"{name} {'is left out' if refused else 'becomes no key'}: "
    (told,) = (each for each in said.err.splitlines() if fate in each)
    assert row.text in told
    assert f"# {name} " in said.out


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (
            "color_jitter=(0.32,0.32,0.32,0.08) color_jitter_prob=0.8 gray_scale_prob=0.2",
            {"color_jitter": (0.32, 0.32, 0.32, 0.08), "color_jitter_prob": 0.8, "gray_scale_prob": 0.2},
        ),
        (
            "use_timm=True color_jitter=0.4 ratio=(0.5,2)",
            {"color_jitter": (0.4, 0.4, 0.4, 0.0), "color_jitter_prob": 1.0, "crop_ratio": (0.5, 2.0)},
        ),
        ("use_timm=True re_prob=0.25 re_count=3", {"erase_prob": 0.25, "erase_count": 3}),
        ("use_timm=True", {}),
    ],
)
def test_augmentation_becomes_that_of_open_clip_train(
    flags: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    line = f"{BASE} --aug-cfg {flags}"
    assert "is left out" not in translated(line).err
    assert job_of(line, tmp_path).data.augment.model_dump(exclude_defaults=True) == settings


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--train-data a.tar --lock-text-unlocked-layers 3", "no effect without --lock-text"),
        ("--train-data a.tar --lr-cooldown-end 1", "only const-cooldown uses it"),
        ("--train-data a.tar --coca-caption-loss-weight 1", "only CoCa models use it"),
        ("--train-data a.tar --distill-model ViT-B-16", "only --distill-model with --distill-pretrained"),
        ("--train-data a.tar --wandb-project-name p", "no effect without W&B"),
        ("--train-data a.tar --zeroshot-frequency 3", "nothing to evaluate on"),
        ("--train-data a.tar --imagenet-val /in --zeroshot-frequency 0", "never evaluates"),
        ("--train-data a.csv --train-num-samples 7", "rows of a table are counted"),
        ("--train-data a.csv --save-frequency 2", "set checkpoint.every_steps"),
        ("--train-data a.tar --device cuda:1", "CUDA_VISIBLE_DEVICES"),
        ("--train-data a.tar --logs none", "always has a folder"),
        ("--train-data a.tar --horovod --dist-backend hccl", "no effect with --horovod"),
        ("--train-data a.tar --aug-cfg color_jitter=0.4", "without use_timm, open_clip_train does not use c"),
        ("--train-data a.csv --image-key png", "only shards"),
        ("--train-data a.tar --json-text-key a --text-key caption", "no effect with --json-text-key"),
        ("--train-data a.tar --fsdp --ddp-static-graph", "no effect with --fsdp"),
        ("--train-data a.tar --aug-cfg use_timm=True gray_scale_prob=1", "with use_timm, open_clip_train d"),
    ],
)
def test_a_flag_without_effect_in_open_clip_train_is_dropped(line: str, why: str) -> None:
    told = translated(line).err
    assert "is left out" not in told
    assert any(why in text for text in told.splitlines() if " becomes no key: " in text)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--train-data a.tar --opt timm/adan", "those that a resumed run repeats: timm/nadamw"),
        ("--train-data a.tar --opt timm/lamb --lr 1e-3", "clips the gradient at a norm of 1 by itself"),
        ("--train-data a.tar --opt timm/muon --lr 1e-3", "takes tables of embeddings for matrices"),
        ("--train-data a.tar --opt timm/lion --lr 1e-4", "write --beta1, --beta2 out"),
        ("--train-data a.tar --precision pure_bf16", "weights in half precision"),
        ("--train-data a.tar --lr-scheduler const-cooldown", "needs --epochs-cooldown"),
        ("--train-data a.tar --lr-scheduler const-cooldown --epochs-cooldown 99", "99 of 32 epochs"),
        ("--train-data a.tar --siglip --distill-model RN50 --distill-pretrained openai", "rows of a softmax"),
        ("--train-data a.tar --image-interpolation random", "timm's augmentation"),
        ("--train-data a.csv --csv-separator ab", "one character"),
        ("--train-data a.tar --val-data 'pipe:cat v.tar' --dataset-type webdataset", "cannot share a stream"),
        ("--train-data a.txt", "open_clip_train ends there"),
        ("--train-data a.tar --resume s3://b/x.pt", "behind a URL"),
        ("--train-data a.tar --logs s3://b/logs", "a run folder behind an address; --remote-sync copies"),
        ("--train-data a.tar --remote-sync hf://me/runs", "copies go to folders and to s3://"),
        ("--train-data a.tar --device mps", "mps"),
        ("--train-data a.tar --ddp-static-graph --accum-freq 2", "excludes accumulation"),
        ("--train-data a.tar --model ViT-B-16-SigLIP --force-quick-gelu", "no variant with -quickgelu"),
        ("--train-data a.tar --model CLAP-HTSAT-tiny", "audio"),
        ("--train-data a.tar --model naflexgenlip_b16", "captions alone (GenLIP)"),
        ("--train-data a.tar --text-key txt;caption", "several endings"),
        ("--train-data a.tar --json-text-key a.b", "a dot or brackets: a.b"),
        ("--train-data a.tar --json-text-key a;b --json-text-key-probs 1 0", "none stands in for others"),
        ("--train-data a.tar --model ViT-B-16 --use-naflex", "image tower of ViT-B-16 becomes another one"),
        (f"{NAFLEX} --naflex-patch-sizes 16 --naflex-patch-size-probs 1 2", "1 size with 2 numbers"),
    ],
)
def test_what_a_job_cannot_express_is_refused_unless_partial(line: str, why: str) -> None:
    whole = clipship("from-open-clip", "--gpus", "2", "--", *shlex.split(line))
    assert (whole.code, whole.out) == (2, "")
    part = translated(line, "--gpus", 2)
    assert part.code == 0
    assert why in whole.err
    assert why in part.err
    assert "--partial" in whole.err
    assert "is left out" in part.err
    assert tomllib.loads(part.out)["name"]


@pytest.mark.parametrize(("flags", "differs"), [("--aug-cfg use_timm=True", True), ("", False)])
def test_an_interpolation_of_training_that_is_lost_is_told(flags: str, differs: bool) -> None:
    told = translated(f"{BASE} --image-interpolation bilinear {flags}").err
    assert ("--image-interpolation bilinear is that of evaluation" in told) is differs


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "--train-data is missing"),
        ("--val-data v.tar", "`clipship eval`"),
        ("--train-data a.tar --trian-data b", "no flag of open_clip_train 3.3; did you mean --train-data?"),
        ("--train-data a.tar --batch_size 3", "did you mean --batch-size?"),
        ("--train-data a.tar --frobnicate", "docs/from-open-clip.md"),
        ("--train-data a.tar b.tar", "b.tar belongs to no flag"),
        ("--train-data a.tar --epochs x", "invalid int value: 'x'"),
        ("--train-data a.tar --aug-cfg scale=(0.4,True)", "scale=(0.4, True): expected 2 numbers"),
        (f"--train-data a.tar --aug-cfg scale=({10**400},1)", ": expected 2 numbers in brackets"),
        ("--train-data a.tar --aug-cfg gray_scale_prob={[]:1}", "={[]:1}: expected a number"),
        (f"--train-data a.tar --aug-cfg gray_scale_prob={'-' * 9999}1", ": expected a number"),
        ("--train-data a.tar --aug-cfg use_timm=True re_prob=1 re_count=1.5", "erase_count: "),
        (
            "--train-data a.tar --aug-cfg use_timm=True color_jitter=(1,1,1,1,1)",
            "or 3 numbers in brackets or 4",
        ),
        (f"{NAFLEX} --naflex-seq-lens 0", "open_clip_train ends, too: --naflex-seq-lens"),
        (f"{BASE} --horovod --fsdp", "--fsdp is no flag of open_clip_train 3.3; only 4 has it"),
        ("--train-data a.tar --name a/b", "name of a folder"),
        ("--train-data 'pipe:cat a.tar' --dataset-type webdataset", "stream_samples"),
    ],
)
def test_bad_input_is_one_message_with_exit_code_2(line: str, message: str) -> None:
    for more in ([], ["--partial"]):
        code, out, err = clipship("from-open-clip", *more, "--", *shlex.split(line))
        assert (code, out) == (2, "")
        assert err.count(message) == 1
        assert "Traceback" not in err


def test_number_of_gpus_becomes_that_of_each_node_and_a_gpus_batch_that_of_all() -> None:
    table = table_of(f"{BASE} --batch-size 32 --accum-freq 4", gpus=8)
    assert (table["resources.gpus_per_node"], table["optim.global_batch_size"]) == (8, 1024)
    program = "torchrun --nproc_per_node 4 --nnodes=2 -m open_clip_train.main"
    spread = table_of(f"{program} {BASE}", None)
    assert (spread["resources.nodes"], spread["resources.gpus_per_node"]) == (2, 4)
    assert (spread["optim.global_batch_size"], spread["optim.max_batch_size_per_gpu"]) == (8 * 64, 64)
    assert "resources.gpus_per_node" not in table_of(BASE, 1)
    assert "whose product is 16" in translated(BASE, "--gpus", 16).err
    assert "# the global batch is that of 1 GPU" in translated(BASE).out


@pytest.mark.open_clip("4")
@pytest.mark.parametrize("name", ["RN50", "ViT-B-32", "roberta-ViT-B-32", "EVA02-B-16", "coca_ViT-B-32"])
def test_weight_decay_spares_what_release_4_spares(name: str, tmp_path: Path) -> None:
    from open_clip_train.optim import make_wd_exclude

    settings = job_of(f"{SHARDS} --model {name} --wd-exclude text.token_embedding*", tmp_path).optim
    text = open_clip.get_model_config(name)["text_cfg"]
    if "hf_model_name" in text:
        tower = make_tower(tmp_path / "tower", "roberta", weights=False)
        text |= {"hf_model_name": str(tower), "hf_model_pretrained": False}
    with torch.device("meta"):
        model = open_clip.create_model(name, device="meta", text_cfg=text)
    spared = make_wd_exclude(model, ["text.token_embedding*"])
    for parameter_name, parameter in model.named_parameters():
        assert decays(parameter_name, parameter, settings) != spared(parameter_name, parameter)


def test_flags_may_stand_without_two_dashes_before_them() -> None:
    said = clipship("from-open-clip", *shlex.split(BASE), "--partial", "--gpus", "3", "--torchscript")
    assert "# 64 on each of 3 GPUs" in said.out


def test_sources_become_a_list_and_braces_stay() -> None:
    sources = "--train-data a/{0..9}.tar::b/{0..3}.tar --dataset-resampled"
    table = table_of(f"{sources} --train-data-upsampling-factors 1::0.5")
    assert table["data.train"] == ["a/{0..9}.tar", "b/{0..3}.tar"]
    assert table["data.weights"] == [1.0, 0.5]
    assert table_of("--train-data a::b.csv")["data.train"] == "a::b.csv"


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("samples", [1, 64, 65, 12345])
@pytest.mark.parametrize(("gpus", "batch", "workers", "accumulated"), [(2, 16, 3, 1), (4, 4, 2, 3)])
def test_steps_are_those_that_open_clip_train_makes(
    samples: int, gpus: int, batch: int, workers: int, accumulated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its data.py imports pandas, for tables alone.
    monkeypatch.setitem(sys.modules, "pandas", module_from_spec(ModuleSpec("pandas", None)))
    from open_clip_train.data import get_wds_dataset

    data = f"--train-data {{00..99}}.tar --train-num-samples {samples} --workers {workers}"
    arguments = f"{data} --batch-size {batch} --accum-freq {accumulated}"
    line = read(shlex.split(arguments), gpus)
    real = argparse.Namespace(**{name[2:].replace("-", "_"): value for name, value in line.values.items()})
    real.world_size = gpus
    theirs = get_wds_dataset(real, lambda image: image, is_train=True, tokenizer=lambda text: [text])
    assert line.epoch_steps == theirs.dataloader.num_batches // accumulated


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--warmup 100",
        "--lr-scheduler const --warmup 100",
        "--skip-scheduler",
        "--lr-scheduler const-cooldown --warmup 5 --epochs 4 --epochs-cooldown 2 --lr-cooldown-power 0.5",
        "--lr-scheduler const-cooldown --warmup 0 --epochs 3 --epochs-cooldown 1 --lr-cooldown-end 1e-5",
        "--lr-scheduler const-cooldown --warmup 9 --epochs 2 --epochs-cooldown 2",
    ],
)
def test_the_learning_rate_of_every_step_is_open_clip_trains(flags: str, tmp_path: Path) -> None:
    from open_clip_train.scheduler import const_lr, const_lr_cooldown, cosine_lr

    data = "--train-data {0..9}.tar --train-num-samples 160 --batch-size 8 --workers 1"
    arguments = f"{data} --epochs 1 --lr 3e-4 {flags}"
    line, job = read(shlex.split(arguments), 1), job_of(arguments, tmp_path, 1)
    steps = job.optim.steps or 0
    assert steps == 20 * line["--epochs"]
    settings = (argparse.Namespace(param_groups=[]), line["--lr"], line["--warmup"], steps)
    if line["--lr-scheduler"] == "const-cooldown":
        cooldown = (20 * line["--epochs-cooldown"], line["--lr-cooldown-power"], line["--lr-cooldown-end"])
        schedule = const_lr_cooldown(*settings, *cooldown)
    else:
        schedule = {"const": const_lr, "cosine": cosine_lr}[line["--lr-scheduler"]](*settings)
    for step in range(steps):
        expected = line["--lr"] if line["--skip-scheduler"] else schedule(step)
        assert learning_rate(job.optim, step, steps) == pytest.approx(expected, rel=1e-12)


def test_synthetic_data_and_streams_have_a_number_of_samples() -> None:
    assert table_of("--dataset-type synthetic --train-num-samples 99")["data.synthetic_samples"] == 99
    table = table_of("--train-data 'pipe:cat {0..7}.tar' --dataset-type webdataset --train-num-samples 99")
    assert (table["data.train"], table["data.stream_samples"]) == ("pipe:cat {0..7}.tar", 99)
    assert table["data.caption_lines"] == "one", "open_clip_train takes the whole text"


def test_imagenet_is_evaluated_with_the_names_and_sentences_of_open_clip() -> None:
    from open_clip import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES

    table = table_of(f"{BASE} --imagenet-val /in")
    assert (table["eval.class_names"], table["eval.templates"]) == ("set:imagenet", "set:imagenet")
    settings = Eval(class_names=table["eval.class_names"], templates=table["eval.templates"])
    assert class_names(settings) == tuple(IMAGENET_CLASSNAMES)
    sentences = [text.format("cat") for text in templates(settings)]
    assert sentences == [make("cat") for make in OPENAI_IMAGENET_TEMPLATES]


def test_comments_hold_no_control_characters_and_no_secrets() -> None:
    line = ["--train-data", "a.tar", "--wandb-notes", "a\nb\x1b[1m", "--logs", "https://u:secret-password@h/"]
    text = translated(line).out
    assert "\x1b" not in text
    assert not any("secret-password" in line for line in text.splitlines() if line.startswith("#"))


def test_the_command_imports_no_torch() -> None:
    code = (
        "import sys; from trainer.cli.main import main; "
        "code = main(['from-open-clip', '--', '--train-data', 'a.tar', '--imagenet-val', '/in']); "
        "sys.exit(code or (3 if {'torch', 'open_clip', 'open_clip_train'} & sys.modules.keys() else 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_budgets_of_patches_have_the_shares_of_samples_that_they_have_in_open_clip_train() -> None:
    lengths = "--naflex-seq-lens 576 128 256 64 --naflex-seq-len-probs 2 1 1 0"
    table = table_of(f"{NAFLEX} {lengths} --naflex-max-tokens-per-batch 8192", gpus=4)
    sizes = {n: calculate_naflex_batch_size(8192, n, divisor=8) for n in (128, 256, 576)}
    samples = [sizes[128], sizes[256], 2 * sizes[576]]
    assert table["model.image_tokens"] == [128, 256, 576]
    assert table["model.image_tokens_weights"] == pytest.approx([n / sum(samples) for n in samples], abs=1e-5)
    assert table["optim.global_batch_size"] == 4 * round(sum(samples) / 4)


def test_one_budget_of_patches_has_the_batch_of_open_clip_train() -> None:
    one = "--naflex-seq-lens 256 --naflex-max-tokens-per-batch 5000 --naflex-patch-sizes 16"
    table = table_of(f"{NAFLEX} {one} --accum-freq 2", gpus=4)
    assert table["model.image_tokens"] == 256
    assert table["model.image_patches"] == [16]
    assert table["optim.global_batch_size"] == 2 * 4 * calculate_naflex_batch_size(5000, 256, divisor=8)
    assert "model.image_tokens_weights" not in table
    small = table_of(f"{NAFLEX} --naflex-seq-lens 256 --naflex-max-tokens-per-batch 100", gpus=4)
    assert (small["optim.global_batch_size"], small["optim.max_image_tokens_per_gpu"]) == (4, 256)
