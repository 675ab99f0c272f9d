"""The newest step survives in memory to the last bit, and nothing else is ever taken for it."""

import errno
import json
import os
import pkgutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import RESNET, small_job
from tests.support.steps import TrainStep, drawn, micro_batches, state_of
from tests.support.steps import same as same_tensors
from tests.support.thread_ranks import run_ranks
from tests.unit.test_checkpoint import _optimizer_by_name, _train
from trainer.checkpoint.identity import RunIdentity
from trainer.checkpoint.memory_keeper import Cadence, MemoryKeeper
from trainer.checkpoint.memory_layout import Layout, named_tensors
from trainer.checkpoint.memory_restore import NodeMemory, choose, node_memory
from trainer.checkpoint.memory_state import PartWriter, kept_steps
from trainer.checkpoint.resume import StartPoint, restore
from trainer.comm.protocol import Comm
from trainer.errors import InputError
from trainer.train.keep_in_memory import keeper_of, summary_of
from trainer.world.rendezvous import Rendezvous
from trainer.world.state_parts import newest_step

START = "the start"
SAMPLES, LANES = 64, {"block_samples": 7, "lanes": 8}


def step_of(train: TrainStep, step: int) -> None:
    train(micro_batches(*drawn(train.model, 16, seed=step), 16), step)


def keepers(folder: Path, train: TrainStep, parts: int = 1, **options: Any) -> list[MemoryKeeper]:
    return [MemoryKeeper(folder, START, train, part, parts, **options) for part in range(parts)]


def keep(keepers: list[MemoryKeeper], step: int, record: dict[str, object] | None = None) -> None:
    written: Future[Mapping[str, object]] = Future()
    written.set_result(record or {})
    for keeper in keepers:
        keeper.keep(step, written)


def memory(folder: Path, part: int = 0, parts: int = 1) -> NodeMemory:
    return NodeMemory(folder, START, part, parts, 0, tuple(kept_steps(folder, START)))


def restored(
    comm: Comm, folder: Path, train: TrainStep | None = None, run: RunIdentity | None = None
) -> StartPoint:
    """A start from what is in a folder of memory, and from checkpoints in it if there are any."""
    run = run or RunIdentity(small_job(), SAMPLES)
    train = train or _train(comm, run.job, steps=0)
    return restore(run.job, comm, folder / "checkpoints", train, run, memory(folder))


def same(one: TrainStep, other: TrainStep) -> bool:
    ours, theirs = _optimizer_by_name(one), _optimizer_by_name(other)
    return (
        same_tensors(state_of(one.model), state_of(other.model))
        and ours.keys() == theirs.keys()
        and all(torch.equal(value, theirs[place]) for place, value in ours.items())
    )


@pytest.mark.parametrize("parts", [1, 3])
def test_weights_optimizer_and_statistics_come_back_to_the_last_bit(
    tmp_path: Path, alone: Comm, parts: int
) -> None:
    """Batch norm's statistics too. The parts are any number of local ranks', and one rank reads them all."""
    job = small_job(config=RESNET, model={"channels_last": True})
    train, twin = _train(alone, job, steps=0), _train(alone, job, steps=0)
    kept = keepers(tmp_path, train, parts)
    for step in range(3):
        step_of(train, step)
        keep(kept, step + 1, {"step": step + 1, "loss": 0.5})
    start = restored(alone, tmp_path, twin, RunIdentity(job, SAMPLES))
    assert (start.steps_done, start.saved_step, str(start)) == (3, 0, "step 3, from the memory of here")
    assert start.memory is not None
    assert start.memory.record == {"step": 3, "loss": 0.5}
    assert same(train, twin)
    step_of(train, 3)
    step_of(twin, 3)
    assert same(train, twin), "the next step is the same, too"


def test_the_gradient_scaler_comes_back(tmp_path: Path, alone: Comm) -> None:
    job = small_job(model={"precision": "fp16"})
    train, twin = _train(alone, job), _train(alone, job, steps=0)
    train.scaler.update(4096.0)
    keep(keepers(tmp_path, train), 1)
    assert restored(alone, tmp_path, twin, RunIdentity(job, SAMPLES)).steps_done == 1
    assert twin.scaler.get_scale() == 4096.0


def without(pattern: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return harm


CUT = without("*-00001-of-00003.json")
"""The ranks were killed before they sealed the second of three parts."""


def flip(folder: Path) -> None:
    for path in folder.glob("*.data"):
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))


def shorten(folder: Path) -> None:
    for path in folder.glob("*.data"):
        os.truncate(path, 4096)


def other_layout(folder: Path) -> None:
    for path in folder.glob("*.layout"):
        about = json.loads(path.read_text())
        about["entries"][0]["shape"].append(1)
        path.write_text(json.dumps(about))


def other_start(folder: Path) -> None:
    for path in folder.glob("*.json"):
        path.write_text(path.read_text().replace(START, "another"))


@pytest.mark.parametrize("harm", [CUT, flip, shorten, other_layout, without("*.layout"), other_start])
def test_what_is_torn_damaged_or_another_starts_is_not_a_step(
    tmp_path: Path, alone: Comm, harm: Callable[[Path], None]
) -> None:
    keep(keepers(tmp_path, _train(alone), parts=3), 1)
    assert [kept.step for kept in kept_steps(tmp_path, START)] == [1]
    harm(tmp_path)
    assert kept_steps(tmp_path, START) == []


def test_rank_that_is_killed_while_it_copies_leaves_the_step_before(
    tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        raise Killed

    train = _train(alone)
    kept = keepers(tmp_path, train, parts=2)
    for step in (1, 2):
        keep(kept, step)
        step_of(train, step)
    before = torch.clone(next(train.model.parameters()).detach())
    kept[0].keep(3, None)
    monkeypatch.setattr(torch, "_foreach_copy_", killed)
    with pytest.raises(Killed):
        kept[1].keep(3, None)
    assert [each.step for each in kept_steps(tmp_path, START)] == [2]
    assert newest_step(tmp_path, START) == 2
    twin = _train(alone, steps=0)
    kept_steps(tmp_path, START)[0].load(twin)
    assert not torch.equal(before, next(twin.model.parameters())), "it is step 2's"


def test_state_that_grows_gets_a_new_layout_and_the_old_bytes_go(tmp_path: Path, alone: Comm) -> None:
    """An optimizer has no state of a parameter before its first gradient."""
    train = _train(alone)
    late = next(train.model.parameters())
    state = train.optimizer.state.pop(late)
    kept = keepers(tmp_path, train)
    keep(kept, 1)
    train.optimizer.state[late] = state
    keep(kept, 2)
    assert [each.step for each in kept_steps(tmp_path, START)] == [2, 1]
    keep(kept, 3)
    assert [each.step for each in kept_steps(tmp_path, START)] == [3, 2]
    assert len(list(tmp_path.glob("*.data"))) == 2


@pytest.mark.parametrize(
    ("offers", "on_disk", "chosen"),
    [
        ([[], [(7, "a"), (6, "b")], [], [(6, "b")]], 4, (7, 1, {})),
        ([[(6, "b")], [], [(7, "a")], [(7, "a")]], 7, (7, 2, {})),
        ([[], []], 0, (0, 0, {})),
        ([[(7, "a")]], 8, (0, 0, {})),  # a newer checkpoint wins
        ([[(7, "a"), (6, "b")], [(7, "other"), (6, "b")], []], 4, (6, 0, {7: [0, 1]})),
        ([[(7, "a")], [(7, "other")]], 4, (0, 0, {7: [0, 1]})),
    ],
)
def test_newest_step_of_any_node_is_taken_from_the_first_rank_that_has_it_unless_copies_differ(
    offers: Any, on_disk: int, chosen: tuple[int, int, Any]
) -> None:
    assert astuple(choose(offers, on_disk)) == chosen


def test_start_from_the_disk_gives_up_what_is_in_memory(tmp_path: Path, alone: Comm) -> None:
    """A step of a state that the run has left must not come back after the next fault."""
    keep(keepers(tmp_path, _train(alone)), 1)
    assert memory(tmp_path).kept
    (tmp_path / "checkpoints" / "step-00000009").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000009" / "manifest.json").write_text("{}")  # newer, and broken
    with pytest.raises(InputError, match="has done steps, and none of them can be read"):
        restored(alone, tmp_path)
    assert newest_step(tmp_path, START) == 0


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (RunIdentity(small_job(), 8), "data.train had 64 samples then and has 8 now"),
        (RunIdentity(small_job(), SAMPLES, data_files="other"), "the files of data.train have other sizes"),
        (RunIdentity(small_job(), SAMPLES, {"model.json": "4"}), "the config of the model .*vit.json has"),
        (
            RunIdentity(small_job(), SAMPLES, {"vocab.txt": "4"}),
            "the file vocab.txt of the model .* has other",
        ),
        (RunIdentity(small_job(optim={"lr": 5e-4}), SAMPLES), "optim.lr is 0.001 there and 0.0005 here"),
    ],
)
def test_step_of_another_run_ends_the_run_and_says_what_changed(
    tmp_path: Path, alone: Comm, now: RunIdentity, says: str
) -> None:
    """Neither its weights are taken, of the same shapes or not, nor does the run begin again from 0."""
    before = RunIdentity(small_job(), SAMPLES, {"model.json": "2", "vocab.txt": "2"}, "one", order=LANES)
    keep(keepers(tmp_path, _train(alone), run=before.facts()), 3)
    with pytest.raises(InputError, match=f"step 3, which a node has in memory, is another run's: {says}"):
        restored(alone, tmp_path, run=now)
    assert restored(alone, tmp_path, run=before).steps_done == 3


def test_other_class_names_than_before_a_restart_are_said(
    tmp_path: Path, alone: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on: its weights do not depend on them, and its figures do."""
    before = RunIdentity(small_job(), SAMPLES, eval_files={"eval.class_names": "2"}, order=LANES)
    now = RunIdentity(small_job(), SAMPLES, eval_files={"eval.class_names": "4"})
    keep(keepers(tmp_path, _train(alone), run=before.facts()), 3)
    for run, said in ((before, 0), (now, 1)):
        caplog.clear()
        assert restored(alone, tmp_path, run=run).steps_done == 3
        assert caplog.text.count("eval.class_names has other contents than then") == said


def test_samples_that_were_skipped_count_once_after_two_restarts(
    tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that completes no step in between still has one whose counts are in the sum of the others'."""
    monkeypatch.setattr("trainer.checkpoint.memory_restore.broadcast_replicas", lambda *of: None)
    trains, folders = [_train(alone), _train(alone)], [tmp_path / "a", tmp_path / "b"]

    def begin(comm: Any) -> StartPoint:
        rank = comm.world.rank
        held = NodeMemory(folders[rank], START, 0, 1, rank, tuple(kept_steps(folders[rank], START)))
        run = RunIdentity(small_job(), SAMPLES)
        return restore(run.job, comm, tmp_path / "checkpoints", trains[rank], run, held)

    def restarted() -> StartPoint:
        first, second = run_ranks(2, begin)
        assert first.bad_samples == second.bad_samples
        return first

    for folder, train, skipped in zip(folders, trains, (5, 3), strict=True):
        folder.mkdir()
        keepers(folder, train)[0].keep(3, None, {"too large": skipped}, {})
    found = restarted()
    assert (found.steps_done, found.bad_samples) == (3, {"too large": 8})
    assert found.memory is not None
    again = keepers(folders[0], trains[0], first_buffer=found.memory.first_buffer)[0]
    again.keep(4, None, {"too large": 1}, found.bad_samples)
    found = restarted()
    assert (found.steps_done, found.bad_samples) == (4, {"too large": 9})


def test_later_checkpoints_are_moved_aside_and_leftovers_removed(tmp_path: Path, alone: Comm) -> None:
    keep(keepers(tmp_path, _train(alone)), 5)
    for name in ("step-00000004", "step-00000007", ".step-00000006.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000004" / "manifest.json").touch()
    start = restored(alone, tmp_path)
    assert (start.steps_done, start.saved_step) == (5, 4)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["aside-step-00000007", "step-00000004"]


def test_job_without_restarts_or_with_the_key_off_keeps_nothing(tmp_path: Path, alone: Comm) -> None:
    env = {**Rendezvous("here", 4711, "secret").variables(), "CLIPSHIP_STATE_DIR": str(tmp_path)}
    assert node_memory(small_job(), alone, env) is None
    off = small_job(recovery={"max_restarts": 1, "keep_in_memory": False})
    assert node_memory(off, alone, env) is None
    on = small_job(recovery={"max_restarts": 1})
    found = node_memory(on, alone, env)
    assert found is not None
    assert (found.folder, found.part, found.parts, found.leader) == (tmp_path, 0, 1, 0)
    lonely = node_memory(on, alone, {"CLIPSHIP_STATE_DIR": str(tmp_path)})
    assert lonely is not None
    assert lonely.folder is None, "no supervisor, so nobody would remove it"


def test_memory_that_is_full_stops_the_keeping_and_not_the_run(
    tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    reasons: list[str] = []
    monkeypatch.setattr(os, "posix_fallocate", full)
    (keeper,) = keepers(tmp_path, _train(alone), failed=reasons.append)
    assert keeper.own_need < 0
    keeper.keep(1, None)
    keeper.keep(2, None)
    assert reasons == ["[Errno 28] No space left on device"]
    assert keeper.own_need == 1, "the others choose without it"
    keeper.close()


@pytest.mark.parametrize(
    ("value", "said"),
    [(torch.ones(4, 4)[:, :2], "do not fill a range of memory"), (3, "is a int and no tensor")],
)
def test_a_value_that_cannot_be_kept_stops_the_keeping_and_is_named(
    tmp_path: Path, alone: Comm, value: Any, said: str
) -> None:
    train, reasons = _train(alone), list[str]()
    train.optimizer.state[next(train.model.parameters())]["count"] = value
    (keeper,) = keepers(tmp_path, train, failed=reasons.append)
    keeper.keep(1, None)
    (reason,) = reasons
    assert said in reason
    assert kept_steps(tmp_path, START) == []


def test_job_may_say_itself_how_often_steps_are_kept(tmp_path: Path, alone: Comm) -> None:
    train = _train(alone)
    here = NodeMemory(tmp_path, START, 0, 1, 0)
    assert keeper_of(None, StartPoint(0, None), train, alone, 2) is None
    keeper = keeper_of(here, StartPoint(0, None), train, alone, 2)
    assert keeper is not None
    for step in (1, 2, 3):
        keep([keeper], step)
    assert [kept.step for kept in kept_steps(tmp_path, START)] == [2]
    assert kept_steps(tmp_path, START)[0].about["every"] == 2
    assert summary_of(keeper)["in_memory"] == {"every_steps": 2, "bytes_per_node": 2 * keeper.bytes}
    assert summary_of(None) == {}


def test_a_run_whose_ranks_all_keep_nothing_goes_on(alone: Comm) -> None:
    """A rank that no launcher started, or with a full /dev/shm: it has measured nothing that it could say."""
    keeper = keeper_of(NodeMemory(None, START, 0, 1, 0), StartPoint(0, None), _train(alone), alone)
    assert keeper is not None
    keeper.receive(keeper.own_need, ranks=1)
    keep([keeper], 1)
    assert "cost_of_each_step" not in str(summary_of(keeper))


def test_a_header_that_tells_of_the_step_is_not_read_again(
    tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, parts = Layout.of(named_tensors(_train(alone)), None), 4
    writers = [PartWriter(tmp_path, START, layout, part, parts) for part in range(parts)]
    asks, read, reader = writers[0], [], "trainer.world.state_parts.read_as"
    read_as = pkgutil.resolve_name(reader)

    def counted(kind: type, path: Path) -> object:
        read.append(path)
        return read_as(kind, path)

    monkeypatch.setattr(reader, counted)
    for step in (1, 2, 3):
        for writer in writers[:3]:
            writer.open_buffer(step % 2)
            writer.seal(step % 2, step, {})
        assert not asks.others_have(step), "the last one still has the step that the buffer held before"
        read.clear()
        for _ in range(10):
            assert not asks.others_have(step)
        assert len(read) == 10
        writers[3].open_buffer(step % 2)
        writers[3].seal(step % 2, step, {})
        assert asks.others_have(step)
        assert asks.others_have(step)
        assert len(read) == 11


# The cost of keeping a step in memory decides how often one is kept.

SHARE = 0.02
"""Largest share of a step's time that keeping it may take."""


def measured(step_s: float, cost_s: float) -> Cadence:
    cadence = Cadence()
    while cadence.own_need < 0:  # not measured yet
        cadence.record(step_s, cost_s)
    return cadence


@pytest.mark.parametrize(
    ("times", "every", "share"),
    [
        ((1.0, SHARE / 2), 1, SHARE / 2),
        ((1.0, 2.5 * SHARE), 3, 2.5 * SHARE),
        ((0.1, 0.0, 0.24), 4, 0.0),  # a copy that lasts several steps begins when the one before is complete
        ((1.0, 0.0, SHARE), 1, None),  # one that lasts a little longer than a step is waited for
    ],
)
def test_every_kth_step_is_kept_so_that_the_cost_stays_below_the_limit(
    times: tuple[float, ...], every: int, share: float | None
) -> None:
    """Each one while it is measured; one slow step and one slow copy change nothing."""
    cadence = Cadence()
    cadence.record(100.0, SHARE / 2)
    cadence.record(1.0, 50.0)
    assert (cadence.every, cadence.chosen) == (1, False)
    while cadence.own_need < 0:
        cadence.record(*times)
    assert cadence.receive(2 * cadence.own_need, ranks=2)
    assert (cadence.every, cadence.chosen) == (every, True)
    assert share in (None, cadence.share)
    assert [step for step in range(1, 13) if cadence.is_due(step)] == list(range(every, 13, every))


def test_ranks_choose_the_same_from_the_sum_and_only_once() -> None:
    cheap, dear = measured(1.0, 0.0), measured(1.0, 4 * SHARE)
    total = cheap.own_need + dear.own_need
    for cadence in (cheap, dear):
        assert cadence.receive(total, 2)
        assert cadence.every == 3
        assert not cadence.receive(9 * total, 2)
    assert not Cadence(4).receive(9 * total, 2), "the ranks before have chosen"


def test_nothing_is_chosen_until_every_rank_has_measured() -> None:
    cadence = measured(1.0, 9 * SHARE)
    assert not cadence.receive(cadence.own_need + Cadence().own_need, 2)
    assert cadence.every == 1
