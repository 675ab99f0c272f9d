"""A run of several stages: each begins where the one before ended, and goes on as a run of its own would.

A run that is done and is started again is left alone, or asked back to one of its checkpoints.
"""

import io
import json
import pkgutil
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.command_line import TINY, clipship, joined, with_file
from tests.support.jobs import tiny_job
from tests.support.steps import same
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.loader import dump_job, load_job
from trainer.config.stages import stages_of
from trainer.copies.copied_run import CopiedRun
from trainer.data.pack import write_shards
from trainer.errors import InputError
from trainer.train.main import prepare, train_whole
from trainer.train.main import train as train_one
from trainer.train.opened import open_whole
from trainer.train.prepare import prepared

STAGES: tuple[dict[str, Any], ...] = (
    {"name": "large", "model": {"image_size": 64}, "optim": {"steps": 5}},
    {"optim": {"global_batch_size": 8, "lr": 1e-4, "steps": 3}, "model": {"context_length": 20}},
)

_file = io.BytesIO()

Image.new("RGB", (32, 32)).save(_file, "png")
PNG = _file.getvalue()


@pytest.fixture(autouse=True)
def signal_as_before() -> Iterator[None]:
    """Undoes after the test what a rank does with its signal."""
    on_stop = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, on_stop)


def staged(folder: Path, stages: tuple[dict[str, Any], ...] = STAGES, **sections: Any) -> Job:
    checkpoint = {"every_steps": 2, "keep": 20, **sections.pop("checkpoint", {})}
    return tiny_job(
        stage=stages,
        logging={"runs": str(folder), "tensorboard": False, "every_steps": 1},
        health={"preflight": False},
        checkpoint=checkpoint,
        **sections,
    )


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    path = folder / "tiny" / "checkpoints" / f"step-{step:08d}" / "model.pt"
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return found


def lines(folder: Path) -> list[tuple[int, float, int]]:
    events = [json.loads(line) for line in (folder / "tiny" / "metrics.jsonl").read_text().splitlines()]
    return [(event["step"], event["loss"], event["samples"]) for event in events if "loss" in event]


def train(job: Job, comm: Comm) -> None:
    opened = open_whole(job, comm)
    assert opened is not None
    train_whole(opened)


def flawed_shards(folder: Path) -> dict[str, Any]:
    """[data] of 32 samples: the image of one cannot be read, and one has no caption."""
    members = [{"png": PNG, "txt": b"a caption"} for _ in range(32)]
    members[3]["png"] = b"not an image"
    del members[4]["txt"]
    folder.mkdir()
    write_shards([(f"{number:02d}", sample) for number, sample in enumerate(members)], folder, 16)
    return {"format": "webdataset", "train": (str(folder / "*.tar"),)}


def lost(folder: Path) -> tuple[dict[str, int], dict[str, int], list[int]]:
    """Returns what result.json says of samples that the run could not use, and metrics.jsonl's counts."""
    result = json.loads((folder / "tiny" / "result.json").read_text())
    events = [json.loads(line) for line in (folder / "tiny" / "metrics.jsonl").read_text().splitlines()]
    counts = [event["bad_samples"] for event in events if "loss" in event]
    return result["bad_samples"], result["left_out"], counts


def one_ahead(steps: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Returns what fetches one step before it gives the one that is due, as on a GPU."""

    def ahead(*arguments: Any) -> Iterator[Any]:
        for step, _ in pairwise(chain(steps(*arguments), [None])):
            yield step

    return ahead


@pytest.mark.parametrize("ahead", [False, True])
def test_samples_that_a_run_could_not_use_are_counted_over_its_stages_and_starts(
    tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    if ahead:
        steps = "trainer.train.prefetch.Prefetcher.steps"
        monkeypatch.setattr(steps, one_ahead(pkgutil.resolve_name("trainer.train.prefetch:Prefetcher.steps")))
    data = flawed_shards(tmp_path / "first")
    stages = ({**STAGES[0], "data": flawed_shards(tmp_path / "second")}, STAGES[1])
    job = staged(tmp_path, stages, data=data, checkpoint={"every_steps": 1})
    train(job, alone)
    whole = lost(tmp_path)
    assert whole[1] == {"no .txt": 2}, "of the first and the last stage, which have one source, and the other"
    assert whole[0] == {"not an image": whole[2][-1]}
    assert whole[2] == sorted(whole[2])
    assert 0 < whole[2][3] < whole[2][8] < whole[2][-1], "each stage has skipped some"
    for step in (10, 6, 3):
        forget_after(tmp_path, step)
        train(job, alone)
        assert lost(tmp_path) == whole


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the one run that all tests of this module begin with."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def whole(kept: Path, tmp_path: Path, alone: Comm) -> Path:
    """A folder with a copy of a whole run of `staged`."""
    if not (kept / "tiny").exists():
        train(staged(kept), alone)
    shutil.copytree(kept / "tiny", tmp_path / "tiny")
    return tmp_path


def forget_after(folder: Path, step: int) -> None:
    """Makes the run one that was killed behind the checkpoint of the step."""
    (folder / "tiny" / "result.json").unlink()
    for path in (folder / "tiny" / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def test_each_stage_is_the_run_that_its_job_alone_would_be(whole: Path, alone: Comm) -> None:
    begins = (4, 9)
    for number, (stage, begin) in enumerate(zip(STAGES, begins, strict=True), 1):
        first = {"init": str(whole / "tiny" / "checkpoints" / f"step-{begin:08d}")}
        folder = whole / str(number)
        own = staged(folder, (), model={**stage.get("model", {}), **first}, optim=stage["optim"])
        train(own.model_copy(update={"seed": number}), alone)
        length = stage["optim"]["steps"]
        assert same(weights(whole, begin + length), weights(folder, length))
        theirs = [(step, loss) for step, loss, _ in lines(whole)]
        assert theirs[begin : begin + length] == [(begin + step, loss) for step, loss, _ in lines(folder)]
    assert [samples for *_, samples in lines(whole)][3::4] == [64, 128, 168]
    result = json.loads((whole / "tiny" / "result.json").read_text())
    assert (result["steps"], result["samples"]) == (12, 4 * 16 + 5 * 16 + 3 * 8)


@pytest.mark.parametrize("step", [4, 6, 12])
def test_a_run_goes_on_in_its_stage_from_its_copy_alone(
    whole: Path, alone: Comm, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights(whole, 12)
    forget_after(whole, step)
    first = staged(whole, checkpoint={"copy_to": str(whole / "far"), "keep": 2})
    opened = open_whole(first, alone)
    assert opened is not None
    setup = prepared(opened)
    assert setup.copier is not None
    setup.copier.finish(60.0)
    shutil.rmtree(whole / "tiny")
    CopiedRun(str(whole / "far" / "tiny")).fetch(whole / "tiny")
    job = load_job(whole / "tiny" / "job.toml")
    assert dump_job(job) == dump_job(first)
    train(job, alone)
    assert same(weights(whole, 12), expected)
    assert len(CopiedRun(str(whole / "far" / "tiny")).whole()) == (2 if step < 12 else 1)
    assert json.loads((whole / "tiny" / "result.json").read_text())["copied_step"] == 12


def test_another_length_of_a_stage_is_another_run(whole: Path, alone: Comm) -> None:
    (whole / "tiny" / "result.json").unlink()
    longer = ({**STAGES[0], "optim": {"steps": 7}}, STAGES[1])
    with pytest.raises(InputError, match=r"the run of another job: stage is .* there and"):
        open_whole(staged(whole, longer), alone)


def test_a_checkpoint_knows_the_steps_of_the_stages_before(whole: Path, alone: Comm) -> None:
    asked = {"resume": str(whole / "tiny" / "checkpoints" / "step-00000006")}
    shorter = staged(whole / "other", optim={"steps": 3}, checkpoint=asked)
    with pytest.raises(InputError, match="the stages before it had 4 steps there and have 3 here"):
        train(shorter, alone)


def test_data_of_a_stage_are_looked_for_before_the_first_one_begins(tmp_path: Path, alone: Comm) -> None:
    missing = ({"data": {"format": "webdataset", "train": (str(tmp_path / "none.tar"),)}},)
    with pytest.raises(InputError, match=r"none\.tar"):
        open_whole(staged(tmp_path, missing), alone)
    assert not (tmp_path / "tiny").exists()


def start(folder: Path, comm: Comm, resume: str = "auto") -> int | None:
    """One start of a run of four steps that saves each; the step it begins at, None where the run is done."""
    setup = prepare(staged(folder, (), checkpoint={"every_steps": 1, "resume": resume}), comm)
    if setup is None:
        return None
    assert not setup.run.result.exists(), "it is not done any more"
    train_one(setup)
    return setup.start.steps_done


def test_a_run_that_is_done_goes_back_once_to_the_checkpoint_it_is_asked_for(
    tmp_path: Path, alone: Comm
) -> None:
    checkpoints = tmp_path / "tiny" / "checkpoints"
    older = str(checkpoints / "step-00000002")
    assert start(tmp_path, alone) == 0
    assert start(tmp_path, alone) is None
    assert start(tmp_path, alone, older) == 2
    assert {"aside-step-00000003", "aside-step-00000004", "step-00000004"} <= {
        path.name for path in checkpoints.iterdir()
    }
    for resume in (older, "auto"):  # the job that was queued again, and any later one
        assert start(tmp_path, alone, resume) is None
    assert json.loads((tmp_path / "tiny" / "result.json").read_text())["steps"] == 4


def test_a_run_that_is_done_stays_so_where_the_checkpoint_is_refused(tmp_path: Path, alone: Comm) -> None:
    assert start(tmp_path, alone) == 0
    broken = tmp_path / "tiny" / "checkpoints" / "step-00000003"
    (broken / "manifest.json").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        start(tmp_path, alone, str(broken))
    assert start(tmp_path, alone) is None


# `[[stage]]` in a job file: the job of each stage, and what is refused.

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
