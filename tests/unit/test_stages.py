"""`[[stage]]` in a job file: the job of each stage, and what is refused."""

import json
from pathlib import Path

import pytest

from tests.support.command_line import TINY, clipship, joined, with_file
from trainer.config import Job
from trainer.config.loader import dump_job, load_job
from trainer.config.stages import stages_of

JOB = """
name = "staged"
[data]
train = ["shards/*.tar"]
[model]
name = "ViT-B-32"
pretrained = "first.pt"
image_size = 112
[optim]
global_batch_size = 64
epochs = 3
lr = 1e-3
"""
TWO = """
[[stage]]
name = "224 pixels"
model.image_size = 224
optim.steps = 200

[[stage]]
[stage.data]
train = ["clean/*.tar"]
augment.gray_scale_prob = 0.1
[stage.optim]
lr = 1e-5
"""


def loaded(tmp_path: Path, stages: str, job: str = JOB) -> Job:
    path = tmp_path / "job.toml"
    path.write_text(job + stages)
    return load_job(path)


def refused(tmp_path: Path, stages: str, job: str = JOB) -> str:
    path = tmp_path / "job.toml"
    path.write_text(job + stages)
    code, _, why = clipship("check", path, "--no-data")
    assert code == 2
    return why.replace(f"{tmp_path}/", "")


def test_a_stage_is_the_job_with_its_own_keys_in_place_of_the_jobs(tmp_path: Path) -> None:
    job = loaded(tmp_path, TWO)
    first, second, third = stages_of(job)
    assert first == job.model_copy(update={"stage": ()})
    assert (second.model.image_size, second.optim.steps, second.optim.epochs) == (224, 200, None)
    assert (second.optim.lr, second.data, second.seed) == (1e-3, first.data, 1)
    assert (third.model.image_size, third.optim.epochs, third.optim.lr) == (112, 3, 1e-5)
    assert third.data.train == (f"{tmp_path}/clean/*.tar",), "a path of the job file's folder"
    assert (third.data.augment.gray_scale_prob, third.seed) == (0.1, 2)
    assert {each.model.pretrained for each in (second, third)} == {None}, "the stage before has the weights"
    (tmp_path / "written.toml").write_text(dump_job(job))
    assert load_job(tmp_path / "written.toml") == job


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ("[[stage]]\noptim.lr = -1.0\n", "job.toml:14: stage.optim.lr: stage 2: must be greater than 0"),
        ("[[stage]]\noptim.stepz = 3\n", "stage.optim.stepz: stage 2: no stage has optim.stepz of its own"),
        ("[[stage]]\noptim.loss = 'siglip'\n", "stage 2: no stage has optim.loss of its own"),
        ("[[stage]]\ncomm.backend = 'fsdp'\n", "stage 2: it has a name and sections data, model, optim"),
        ("[[stage]]\nname = 'a\\u001bb'\n".replace("'", '"'), "stage 2: a name has 1 to 100 printable"),
        ("[stage]\nname = 'x'\n", "stage: expected a list in brackets"),
    ],
)  # fmt: skip
def test_a_stage_that_is_no_job_is_refused_with_its_number(tmp_path: Path, stages: str, problem: str) -> None:
    assert problem in refused(tmp_path, stages)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("lr = 1e-3", "lr = 1e-3\nanchor = 1.0", "optim.anchor"),
        ("image_size = 112", "image_size = 112\nlora_rank = 4", "model.lora_rank"),
        ("[optim]", "[eval]\nmix = 0.5\n[optim]", "eval.mix"),
    ],
)
def test_what_needs_the_first_weights_has_no_stages(tmp_path: Path, old: str, new: str, key: str) -> None:
    assert f"not with {key}, which" in refused(tmp_path, TWO, JOB.replace(old, new))
    loaded(tmp_path, "", JOB.replace(old, new))


def test_standard_input_is_read_by_stages_with_one_and_the_same_data(tmp_path: Path) -> None:
    piped = JOB.replace('train = ["shards/*.tar"]', 'train = ["-"]\nstream_samples = 640')
    assert "job.toml:14: stage: data.train = -: standard input is read once" in refused(
        tmp_path, "[[stage]]\ndata.augment.gray_scale_prob = 0.1\n", piped
    )
    once = '[[stage]]\ndata = { train = ["-"], stream_samples = 64 }\n'
    assert "standard input is read once" in refused(tmp_path, once + once.replace("64", "65"))
    loaded(tmp_path, once + once)
    loaded(tmp_path, "[[stage]]\noptim.lr = 1e-5\n", piped)
    loaded(tmp_path, '[[stage]]\ndata.train = ["late/*.tar"]\n', piped)


def test_a_run_of_several_stages_gets_no_other_length(tmp_path: Path) -> None:
    loaded(tmp_path, TWO)
    said = clipship("run", tmp_path / "job.toml", "--nproc", "1", "--longer", "steps=900")
    assert said.code == 2
    assert "--longer: a run of several stages has the lengths of its job" in said.err


def test_check_refuses_to_go_on_from_a_file_that_knows_no_stages(tmp_path: Path) -> None:
    file = tmp_path / "epoch_3.pt"
    file.touch()
    table = joined(TINY, logging={"runs": str(tmp_path)}, checkpoint={"resume": str(file)})
    table["stage"] = [{"optim": {"steps": 3}}]
    why = with_file(["check"], table).err
    assert f"{file}: a file of open_clip_train knows no [[stage]]" in why
    assert with_file(["check"], table, "--set", "checkpoint.resume=never").code == 0


def test_check_plans_each_stage_and_says_what_is_odd_in_it(tmp_path: Path) -> None:
    synthetic = JOB.replace('train = ["shards/*.tar"]', 'format = "synthetic"\nsynthetic_samples = 640')
    gpus = '[resources]\ngpus_per_node = 1\ngpu = "H100"\n[slurm]\n'
    stage = '[[stage]]\nname = "last"\nmodel.lock_image = true\noptim = { steps = 5, warmup_steps = 9 }\n'
    path = tmp_path / "job.toml"
    path.write_text(synthetic.replace('pretrained = "first.pt"\n', "") + gpus + stage)
    found = json.loads(clipship("check", path, "--no-data", "--json").out)
    (about,) = found["stages"]
    assert (found["steps"], about["stage"], about["steps"]) == (30, "stage 2 (last)", 5)
    assert about["gpu_bytes"] > 0
    assert about["hours"] > 0
    first, steps, *_ = found["rows"]["stage 2"]
    assert first == "last: model.lock_image = true, optim.steps = 5, optim.warmup_steps = 9"
    assert steps.startswith("steps 5 = 0.5 epochs x 10 steps; batch 64 = 1 rank x 1 micro-batch x 64 samples")
    late = [text for text in found["warnings"] if text.startswith("stage 2 (last): ")]
    assert late == [
        "stage 2 (last): warmup_steps 9 is longer than the run of 5 steps: lr 0.001 is never reached"
    ]
