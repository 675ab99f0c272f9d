"""A checkpoint is whole or not there, knows when a bit has changed, and open_clip loads it."""

import errno
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.optim import create_optimizer_v2

from tests.support.harm import cut_short, flip_a_bit
from tests.support.jobs import small_job
from tests.support.steps import MicroBatch, TrainStep, same, state_of, step_of, untrained
from tests.support.training import save
from trainer.checkpoint import files
from trainer.checkpoint.identity import RunIdentity
from trainer.checkpoint.resume import restore
from trainer.checkpoint.writer import CheckpointWriter
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.errors import InputError, MachineError

SAMPLES, LANES = 64, {"block_samples": 7, "lanes": 8}
FACTS = RunIdentity(small_job(), SAMPLES, order=LANES).facts()


def _train(comm: Comm, job: Job | None = None, steps: int = 1) -> TrainStep:
    train = step_of(job or small_job(), comm)
    for step in range(steps):
        train([MicroBatch(torch.randn(16, 3, 32, 32), torch.randint(1, 1000, (16, 16)))], step)
    return train


def _settings(**keys: Any) -> Any:
    return small_job(checkpoint=keys).checkpoint


def _save(
    folder: Path, train: TrainStep, step: int, job: Job | None = None, keep: int = 3, **identity: Any
) -> Path:
    facts = RunIdentity(job or small_job(), SAMPLES, order=LANES, **identity).facts()
    return save(folder, train, step, facts, keep)


def _resumed(
    folder: Path, comm: Comm, job: Job | None = None, samples: int = SAMPLES, **identity: Any
) -> tuple[int, TrainStep]:
    job = job or small_job()
    train = _train(comm, job, steps=0)
    return restore(job, comm, folder, train, RunIdentity(job, samples, **identity)).steps_done, train


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_weights_optimizer_scaler_and_step_come_back_to_the_last_bit(
    tmp_path: Path, alone: Comm, precision: str
) -> None:
    job = small_job(model={"precision": precision})
    train = _train(alone, job, steps=3)
    if precision == "fp16":
        train.scaler.update(4096.0)
    _save(tmp_path, train, 3, job)
    step, resumed = _resumed(tmp_path, alone, job)
    assert step == 3
    assert same(state_of(train.model), state_of(resumed.model))
    assert resumed.scaler.get_scale() == train.scaler.get_scale()
    before, after = _optimizer_by_name(train), _optimizer_by_name(resumed)
    assert before.keys() == after.keys()
    for place, value in before.items():
        assert torch.equal(value, after[place]), place


def _optimizer_by_name(train: TrainStep) -> dict[tuple[str, str], torch.Tensor]:
    return {
        (name, key): value
        for name, parameter in train.model.named_parameters()
        for key, value in train.optimizer.state[parameter].items()
    }


def test_parts_that_several_ranks_wrote_are_read_by_one(tmp_path: Path, alone: Comm) -> None:
    """As they were at that step, though the next one changes them before they are written."""
    train = _train(alone)
    before = state_of(train.model)
    writers = [
        CheckpointWriter(tmp_path, _settings(every_rank_writes=True), rank, 3, 30.0) for rank in (1, 2, 0)
    ]
    for writer in writers:
        writer.save(1, train, FACTS)
    with torch.no_grad():
        torch._foreach_add_(list(train.model.parameters()), 1.0)
    for writer in writers:
        writer.finish()
    names = {path.name for path in (tmp_path / "step-00000001").iterdir()}
    assert names == {
        files.WEIGHTS,
        files.MANIFEST,
        *(f"optimizer-{part:05d}-of-00003.pt" for part in range(3)),
    }
    _, resumed = _resumed(tmp_path, alone)
    assert len(resumed.optimizer.state) == len(train.optimizer.state)
    assert same(state_of(resumed.model), before)


def test_a_part_that_no_rank_writes_is_named(tmp_path: Path, alone: Comm) -> None:
    writer = CheckpointWriter(tmp_path, _settings(every_rank_writes=True), 0, 2, 0.2)
    writer.save(1, _train(alone), {})
    with pytest.raises(TimeoutError, match="optimizer-00001-of-00002"):
        writer.finish()
    assert not (tmp_path / "step-00000001").exists()


def _lose_a_part(folder: Path) -> None:
    (folder / files.WEIGHTS).unlink()


def _with_manifest(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / files.MANIFEST).write_text(text)


def _without(*keys: str) -> Callable[[Path], None]:
    """Takes a key out of the manifest, which stays JSON."""

    def harm(folder: Path) -> None:
        manifest = json.loads((folder / files.MANIFEST).read_text())
        table = manifest
        for key in keys[:-1]:
            table = table[key]
        del table[keys[-1]]
        (folder / files.MANIFEST).write_text(json.dumps(manifest))

    return harm


@pytest.mark.fault("newest checkpoint cut short or flipped bits")
@pytest.mark.fault("newest checkpoint cut short or flipped bits", goes_on=True)
@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (cut_short, "bytes instead of"),
        (flip_a_bit, "checksum"),
        (_lose_a_part, "model.pt is missing"),
        (_with_manifest('{"step": 2, "fil'), "cannot be read"),
        (_with_manifest("[1, 2]"), "malformed: it has no valid step, files"),
        (_without("step"), "malformed: it has no valid step"),
        (_without("files", files.WEIGHTS), "malformed: it has no valid model.pt"),
        (_without("files", files.WEIGHTS, "sha256"), "no size and checksum for model.pt"),
        (_without("job"), "malformed: it has no valid job"),
        (_without("job", "checkpoint"), "malformed: it has no valid checkpoint"),
        (_without("data_samples"), "malformed: it has no valid data_samples"),
    ],
)
def test_a_broken_checkpoint_is_named_and_the_previous_one_is_used(
    tmp_path: Path, alone: Comm, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], object], named: str
) -> None:
    train = _train(alone)
    _save(tmp_path, train, 1)
    harm(newest := _save(tmp_path, train, 2))
    with pytest.raises(InputError, match=f"checkpoint.resume = {newest}: .*{named}"):
        _resumed(tmp_path / "other", alone, small_job(checkpoint={"resume": str(newest)}))
    with caplog.at_level(logging.WARNING):
        step, _ = _resumed(tmp_path, alone)
    assert step == 1
    assert "step-00000002" in caplog.text
    assert named in caplog.text


def failing(number: int) -> Callable[..., None]:
    """A call that the system refuses."""

    def call(*given: object) -> None:
        raise OSError(
            number, os.strerror(number), *[str(each) for each in given[:1] if isinstance(each, Path)]
        )

    return call


def test_a_failed_write_keeps_the_previous_checkpoint_and_says_so(
    tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer, train = CheckpointWriter(tmp_path, _settings(), 0, 1, 30.0), _train(alone)
    for step, says in ((1, "no step of it is saved yet"), (3, "the newest whole one is step-00000002")):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", failing(errno.ENOSPC))
            writer.save(step, train, FACTS)
            writer.wait()
            writer.save(step, train, FACTS)
            with pytest.raises(OSError, match="No space left"):
                writer.finish()
        assert f"(checkpoint.on_failure = continue); {says}." in caplog.text
        caplog.clear()
        writer.save(step + 1, train, FACTS)
        writer.finish()
    assert _resumed(tmp_path, alone)[0] == 4


def test_a_run_folder_that_is_renamed_under_a_run_is_named_and_not_made_again(
    tmp_path: Path, alone: Comm
) -> None:
    (tmp_path / "run").mkdir()
    train = _train(alone)
    writer = CheckpointWriter(tmp_path / "run" / "checkpoints", _settings(), 0, 1, 30.0)
    writer.save(1, train, FACTS)
    writer.finish()
    (tmp_path / "run").rename(tmp_path / "other")
    for step in (2, 3):
        writer.save(step, train, FACTS)
        with pytest.raises(MachineError, match=r"/run was renamed or removed while the run wrote it: give"):
            writer.finish()
    (tmp_path / "other").rename(tmp_path / "run")
    writer.save(4, train, FACTS)
    writer.finish()
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000004"]


@pytest.mark.parametrize("what", ["a file in its place", "too large"])
def test_a_checkpoint_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, alone: Comm, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "too large":
        monkeypatch.setattr(torch, "save", failing(errno.EFBIG))
    else:
        (tmp_path / "checkpoints").touch()
    writer = CheckpointWriter(tmp_path / "checkpoints", _settings(), 0, 1, 30.0)
    writer.save(1, _train(alone), {})
    said = r"^the checkpoint of step 1 cannot be written below .*: (Not|File)"
    with pytest.raises(MachineError, match=said):
        writer.finish()


@pytest.mark.parametrize("data", [{}, {"block_samples": 7}])
def test_a_run_goes_on_with_the_lanes_that_it_was_begun_with(
    tmp_path: Path, alone: Comm, data: dict[str, Any]
) -> None:
    _save(tmp_path, _train(alone), 1)
    job = small_job(data=data)
    start = restore(job, alone, tmp_path, _train(alone), RunIdentity(job, SAMPLES))
    assert start.order == LANES


def test_keys_that_may_change_on_resume_are_accepted(tmp_path: Path, alone: Comm) -> None:
    _save(tmp_path, _train(alone), 1)
    job = small_job(
        data={"workers": 3},
        logging={"every_steps": 7},
        optim={"max_batch_size_per_gpu": 4},
        comm={"deterministic": True},
    )
    assert _resumed(tmp_path, alone, job)[0] == 1


def test_a_later_start_of_a_submission_goes_on_though_it_should_begin_anew(
    tmp_path: Path, alone: Comm
) -> None:
    never, checkpoints = small_job(checkpoint={"resume": "never"}), tmp_path / "checkpoints"
    alone.world = replace(alone.world, submission="7")
    assert _resumed(checkpoints, alone, never)[0] == 0
    _save(checkpoints, _train(alone), 1)
    assert _resumed(checkpoints, alone, never)[0] == 1
    alone.world = replace(alone.world, submission="", generation=2)  # a restart within the start
    assert _resumed(checkpoints, alone, never)[0] == 1
    for other in ("8", ""):
        alone.world = replace(alone.world, submission=other, generation=1)
        with pytest.raises(InputError, match="--fresh"):
            _resumed(checkpoints, alone, never)


def test_a_job_that_is_queued_again_goes_on_from_its_own_checkpoints_not_from_where_it_began(
    tmp_path: Path, alone: Comm
) -> None:
    old = _save(tmp_path / "old", _train(alone), 1)
    job = small_job(checkpoint={"resume": str(old)})
    assert _resumed(tmp_path / "new", alone, job)[0] == 1
    _save(tmp_path / "new", _train(alone), 3, job)
    assert _resumed(tmp_path / "new", alone, job)[0] == 3


def test_a_run_goes_back_to_an_older_checkpoint_of_its_own_once_later_ones_can_be_moved_aside(
    tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = _train(alone)
    job = small_job(checkpoint={"resume": str(_save(tmp_path, train, 1))})
    _save(tmp_path, train, 2)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing(errno.EPERM))
        with pytest.raises(InputError, match=r"from step 1, .* cannot be moved aside: .*step-00000002"):
            _resumed(tmp_path, alone, job)
    assert _resumed(tmp_path, alone, job)[0] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aside-step-00000002", "step-00000001"]


def test_images_that_are_prepared_in_another_way_are_another_run(tmp_path: Path, alone: Comm) -> None:
    then, now = {"mean": [0.5] * 3, "resize_mode": "squash"}, {"mean": [0.5] * 3, "resize_mode": "shortest"}
    _save(tmp_path, _train(alone), 1, preprocessing=then)
    with pytest.raises(InputError, match="with image_resize_mode = squash then and with shortest now"):
        _resumed(tmp_path, alone, preprocessing=now)
    assert _resumed(tmp_path, alone, preprocessing=then)[0] == 1


SCALER = {"scaler": {"scale": 1024.0, "growth_factor": 2.0, "_growth_tracker": 0}}


def _of_open_clip_train(
    path: Path,
    epoch: int,
    release: str = "3.3",
    spared: str = "positional_embedding",
    steps: int | None = 3 * (SAMPLES // 16),
    made: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **more: Any,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A file as open_clip_train writes it after an epoch; the model and the optimizer in it."""
    theirs = untrained(small_job()).model

    def is_free(name: str, p: torch.nn.Parameter) -> bool:
        if p.ndim < 2 or "bn" in name or "ln" in name or "bias" in name or "logit_scale" in name:
            return True
        return release == "4" and spared in name

    free = [p for n, p in theirs.named_parameters() if is_free(n, p)]
    rest = [p for n, p in theirs.named_parameters() if not is_free(n, p)]
    names = [{"group_name": name} if release == "4" else {} for name in ("no_wd", "wd")]
    groups = [{"params": free, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}]
    optimizer = made([group | name for group, name in zip(groups, names, strict=True)], lr=1e-3)
    sum(out.sum() for out in theirs(torch.randn(2, 3, 32, 32), torch.randint(1, 1000, (2, 16)))).backward()
    optimizer.step()
    for moments in optimizer.state.values():
        if "step" in moments:
            moments["step"] = torch.tensor(float(steps or 0))
    content = {
        "epoch": epoch,
        "name": "x",
        "state_dict": {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()},
    }
    written = optimizer.state_dict()
    if steps is None:
        written["state"] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**content, "optimizer": written, **more}, path)
    return theirs, optimizer


@pytest.mark.parametrize("release", ["3.3", "4"])
def test_a_checkpoint_of_open_clip_train_goes_on_with_its_optimizer(
    release: str, tmp_path: Path, alone: Comm
) -> None:
    path = tmp_path / "epoch_3.pt"
    theirs, optimizer = _of_open_clip_train(path, 3, release)
    step, train = _resumed(
        tmp_path / "run", alone, small_job(checkpoint={"resume": str(path)}, optim={"steps": 13})
    )
    assert step == 3 * (SAMPLES // 16)
    names = {id(p): name for name, p in theirs.named_parameters()}
    expected = {names[id(p)]: moments["exp_avg"] for p, moments in optimizer.state.items()}
    ours = {id(p): name for name, p in train.model.named_parameters()}
    for parameter, moments in train.optimizer.state.items():
        assert torch.equal(moments["exp_avg"], expected[ours[id(parameter)]])
    assert train.optimizer.param_groups[0]["weight_decay"] == 0.2


def _batch_of(samples: int) -> str:
    return f"accum_freq: 2\nbatch_size: {samples}\nworld_size: 2\n"


@pytest.mark.parametrize(
    ("counted", "more", "params", "step", "said"),
    [
        (14, {}, "", 14, "has done 14 steps in 3 epochs, which would be 12 here"),
        (None, {}, "", 12, "does not say how many steps it has done"),
        (12, {}, "", 12, None),
        (10, {}, "", 10, "has done 10 steps in 3 epochs"),
        (10, SCALER, "", 12, "counts 10 steps, without those that its GradScaler left out"),
        (14, SCALER, "", 14, "has done 14 steps in 3 epochs, which would be 12 here"),
        (10, {**SCALER, "global_step": 11}, "", 11, "has done 11 steps in 3 epochs"),
        (6, {}, _batch_of(8), 12, "says 32 samples per step (batch_size x world_size x accum_freq)"),
        (6, {}, _batch_of(4), 6, "has done 6 steps"),
        (12, {}, 2**40, 12, "so that its batch is unknown, and its optimizer is not compared by name"),
    ],
)
def test_the_steps_of_open_clip_train_are_those_that_its_file_counts(
    counted: int | None,
    more: dict[str, Any],
    params: str | int,
    step: int,
    said: str | None,
    tmp_path: Path,
    alone: Comm,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "run" / "checkpoints" / "epoch_latest.pt"
    _of_open_clip_train(path, 3, steps=counted, **more)
    if isinstance(params, int):  # bytes of a file that is too large to be read
        with open(tmp_path / "run" / "params.txt", "wb") as file:
            file.truncate(params)
    elif params:
        (tmp_path / "run" / "params.txt").write_text(params)
    job = small_job(checkpoint={"resume": str(path)}, optim={"steps": 20})
    assert _resumed(tmp_path / "ours", alone, job)[0] == step
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == (said is not None)
    assert said is None or said in warned[0]


def test_a_checkpoint_whose_optimizer_has_another_order_is_refused(tmp_path: Path, alone: Comm) -> None:
    path = tmp_path / "epoch_3.pt"
    _of_open_clip_train(path, 3, "4", spared="token_embedding")
    with pytest.raises(InputError, match="in another order"):
        _resumed(tmp_path / "run", alone, small_job(checkpoint={"resume": str(path)}, optim={"steps": 13}))


@pytest.mark.parametrize(
    ("theirs", "ours", "opt", "said"),
    [
        ("muon", "adamw", None, "one that keeps exp_avg exp_avg_sq step and momentum_buffer of a parameter"),
        ("lion", "adopt", None, "one that keeps exp_avg of a parameter"),
        ("adoptw", "adamw", "timm/adoptw", "adoptw"),  # it keeps what AdamW does, on another scale
        ("adamw", "lamb", None, "one that keeps exp_avg exp_avg_sq step of a parameter"),
        ("momentum", "sgd", "timm/momentum", "momentum"),
        ("sgdw", "sgd", "timm/sgdw", ""),  # timm's other name for nesterovw
        ("adoptw", "adopt", "timm/adoptw", ""),
        ("lion", "lion", None, ""),
    ],
)
def test_another_optimizers_state_of_open_clip_train_is_refused(
    theirs: str, ours: str, opt: str | None, said: str, tmp_path: Path, alone: Comm
) -> None:
    path = tmp_path / "run" / "checkpoints" / "epoch_3.pt"
    _of_open_clip_train(path, 3, "4", made=partial(create_optimizer_v2, opt=theirs))
    if opt is not None:
        (tmp_path / "run" / "params.txt").write_text(f"opt: {opt}\n")
    job = small_job(checkpoint={"resume": str(path)}, optim={"steps": 30, "optimizer": ours})
    if said:
        with pytest.raises(
            InputError, match=rf"another one \({said}\) than optim.optimizer = {ours}: set the"
        ):
            _resumed(tmp_path / "ours", alone, job)
    else:
        assert _resumed(tmp_path / "ours", alone, job)[1].optimizer.state


def test_lamb_goes_on_with_the_steps_that_the_groups_of_open_clip_train_count(
    tmp_path: Path, alone: Comm
) -> None:
    """It divides its moments by what they lack, which is much after the first steps alone."""
    path = tmp_path / "epoch_3.pt"

    def made(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        optimizer = create_optimizer_v2(groups, opt="lamb", lr=lr)
        for group in optimizer.param_groups:
            group["step"] = torch.tensor(11.0)
        return optimizer

    _of_open_clip_train(path, 3, "4", made=made)
    job = small_job(checkpoint={"resume": str(path)}, optim={"steps": 30, "optimizer": "lamb"})
    step, train = _resumed(tmp_path / "ours", alone, job)
    assert step == 12
    assert {int(moments["step"]) for moments in train.optimizer.state.values()} == {12}


@pytest.mark.parametrize("length", [{"steps": 6}, {"steps": None, "epochs": 3}])
def test_a_checkpoint_of_open_clip_train_that_leaves_nothing_to_train_is_refused(
    tmp_path: Path, alone: Comm, length: dict[str, Any]
) -> None:
    path = tmp_path / "epoch_3.pt"
    _of_open_clip_train(path, 3)
    end, key = (6, "steps") if length["steps"] else (12, "epochs")
    with pytest.raises(
        InputError,
        match=(
            rf"after epoch 3, which is step 12 here, but this job ends at step {end}: "
            rf"raise optim\.{key}, or .*pretrained"
        ),
    ):
        _resumed(tmp_path / "run", alone, small_job(checkpoint={"resume": str(path)}, optim=length))


def test_loading_runs_no_code(tmp_path: Path, alone: Comm) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "trapped",))

    torch.save({"epoch": 1, "state_dict": Trap(), "optimizer": {}}, tmp_path / "epoch_1.pt")
    with pytest.raises(InputError, match="not a checkpoint of open_clip_train") as refusal:
        _resumed(tmp_path / "run", alone, small_job(checkpoint={"resume": str(tmp_path / "epoch_1.pt")}))
    assert "weights_only" not in str(refusal.value)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("recorded", [5, None, [["k", 2]], {"a": 1.5, "b": True, "c": -1}, {"right": 2}])
def test_counts_of_samples_that_a_manifest_cannot_have_are_passed_over(
    recorded: object, tmp_path: Path, alone: Comm
) -> None:
    path = _save(tmp_path, _train(alone), 2) / files.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "bad_samples": recorded}))
    job = small_job()
    found = restore(job, alone, tmp_path, _train(alone, steps=0), RunIdentity(job, SAMPLES))
    assert (found.steps_done, found.bad_samples) == (2, {"right": 2} if recorded == {"right": 2} else {})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("optimizer", []),
        ("optimizer", {}),
        ("optimizer", {"state": 5, "scaler": {}}),
        ("optimizer", {"state": {"logit_scale": 5}, "scaler": {}}),
        ("optimizer", {"state": {"logit_scale": {"exp_avg": "x"}}, "scaler": {}}),
        ("model", []),
        ("model", {}),
        ("model", {"logit_scale": 5}),
        ("model", 5),
    ],
)
def test_state_of_another_form_is_refused(name: str, content: object, tmp_path: Path, alone: Comm) -> None:
    folder = _save(tmp_path, _train(alone), 2)
    (path,) = folder.glob(f"{name}*.pt")
    torch.save(content, path)
    manifest = json.loads((folder / files.MANIFEST).read_text())
    manifest["files"][path.name] = files._sealed(path)
    (folder / files.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(
        InputError, match=r"step-00000002: its (state is malformed|weights belong to another)"
    ):
        _resumed(tmp_path, alone)
