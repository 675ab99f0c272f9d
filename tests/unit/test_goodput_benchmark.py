"""The figures of `make bench-goodput`: which faults it draws, and what it makes of what it saw."""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.goodput import steps_for
from benchmarks.goodput_faults import EVERY_S, EXTRA_KINDS, FAULTS, KINDS, OF_NODES, Fault, deal, made, only
from benchmarks.goodput_figures import median_s, rows, samples
from benchmarks.goodput_limits import LIMITS, missed, worst
from benchmarks.goodput_nodes import Nodes
from benchmarks.goodput_run import _COMMIT
from benchmarks.goodput_sides import BATCH, EPOCH_STEPS, Ours
from benchmarks.goodput_story import Moment, Seen, Story, read_story


def kinds(faults: Sequence[Fault]) -> list[str]:
    return [fault.kind for fault in faults]


def test_each_run_has_a_fault_of_a_node_and_one_of_a_rank_and_both_runs_every_kind_once() -> None:
    for seed in range(50):
        for minutes, runs in ((1, 1), (3, 2), (FAULTS, 1), (40, 2)):
            for hand in deal(seed, minutes, runs):
                assert {kind in OF_NODES for kind in kinds(hand)} == {True, False}
        hands = deal(seed, FAULTS, 2)  # one fault in a minute
        assert Counter(kind for hand in hands for kind in kinds(hand)) == dict.fromkeys(KINDS, 1)
        for hand in hands:
            number = made(kinds(hand))
            assert number in (FAULTS // 2, FAULTS // 2 + 1)
            assert [fault.at_s for fault in hand] == sorted(fault.at_s for fault in hand)
            assert hand[-1].at_s < (number - 0.4) * EVERY_S, "the run is still under way then"
    assert deal(1, 20, 2) == deal(1, 20, 2) != deal(2, 20, 2)


def test_every_kind_can_be_made() -> None:
    assert _COMMIT.keys() == {*KINDS, *EXTRA_KINDS}


def test_chosen_kinds_come_in_turns_until_there_are_enough() -> None:
    chosen = ("node lost", "rank killed twice in a minute")
    assert kinds(only(chosen, 0, 4)) == [chosen[0], chosen[1], chosen[0]]


def story(*seen: tuple[float, int, int, int]) -> Story:
    return Story(seen=[Seen(*each) for each in seen])


@pytest.mark.parametrize(
    ("seen", "recovery_s"),
    [
        # Step 4 is recorded after the kill, step 4 comes again, and step 5 is new.
        (((1, 1, 1, 3), (2.1, 1, 1, 4), (6, 1, 2, 4), (7, 1, 2, 5), (8, 1, 2, 6)), 5.0),
        # The run was started again, and counts its generations anew.
        (((1, 1, 2, 30), (60, 2, 1, 30), (61, 2, 1, 31)), 59.0),
        # Another fault came in the recovery.
        (((1, 1, 1, 3), (9, 1, 3, 4)), 7.0),
        (((1, 1, 1, 3), (2.5, 1, 1, 4)), None),
    ],
    ids=["new ranks", "started again", "twice", "never"],
)
def test_recovery_ends_with_the_first_new_step_of_new_ranks(
    seen: tuple[tuple[float, int, int, int], ...], recovery_s: float | None
) -> None:
    assert story(*seen).recovery_s(Moment(2.0, "rank killed", False)) == recovery_s


def test_median_of_recoveries_is_unknown_if_the_run_did_not_recover() -> None:
    told = story((1, 1, 1, 3), (6, 1, 2, 4))
    told.moments = [Moment(2.0, "rank killed", False), Moment(3.0, "node lost", True)]
    assert (median_s(told, of_node=False), median_s(told, of_node=True)) == (4.0, 3.0)
    told.moments.append(Moment(7.0, "rank killed", False))
    assert median_s(told, of_node=False) is None


def test_row_of_a_fault_has_the_restart_that_the_run_recorded_after_it() -> None:
    told = story((1, 1, 1, 3), (15, 1, 4, 4))
    told.began = 1000.0
    told.moments = [Moment(2.0, "node lost", True), Moment(8.0, "rank killed", False)]
    restarts: list[dict[str, object]] = [
        {"time": 1004.0, "parts": {"end": 1.0}},
        {"time": 1006.0, "kind": "taken in"},
        {"time": 1008.5, "parts": {}},
    ]
    first, second = rows(told, restarts)
    assert (first["detected_s"], first["parts"], first["recovery_s"]) == (2.0, {"end": 1.0}, 13.0)
    assert (second["detected_s"], second["ended_run"]) == (0.5, False)


def test_story_is_read_as_it_was_written(tmp_path: Path) -> None:
    told = story((1, 1, 1, 3), (6, 1, 2, 4))
    told.moments = [Moment(2.0, "rank killed", False, ended_run=True)]
    told.write(tmp_path / "story.json")
    assert read_story(tmp_path / "story.json") == told


GOOD = {
    name: limit.most if limit.least is None else limit.least for name, limit in LIMITS.items()
}  # each figure just at its limit


@pytest.mark.parametrize("name", LIMITS)
def test_figure_beyond_its_limit_is_named_with_the_limit(name: str) -> None:
    assert not list(missed("torch", GOOD))
    bound = float(GOOD[name] or 0)
    worse = bound - 0.01 if LIMITS[name].least is not None else bound + 1.0
    (sentence,) = missed("torch", {**GOOD, name: worse})
    assert sentence.startswith(f"torch: {name} is {worse:g}")
    assert "must be" in sentence
    (sentence,) = missed("horovod", {**GOOD, name: None})
    assert sentence.startswith(f"horovod: {name} is not known")


def test_missed_useful_share_comes_with_what_the_time_was_spent_on() -> None:
    lost = {"lost_s": {"start": 5.0, "recovery": 10.0, "other": 0.0}, "seconds": 100.0}
    without = {"lost_s_without_faults": {"start": 5.0}, "seconds_without_faults": 50.0}
    (sentence,) = missed("torch", {"useful_share": 0.85, **lost, **without})
    assert sentence.endswith("(the rest: with faults recovery 10.0%, start 5.0%; without start 10.0%)")


def test_worst_of_all_backends_stands_in_the_last_line() -> None:
    one = {**GOOD, "useful_share": 0.97, "samples_lost": 0, "bit_equal": True}
    other = {**GOOD, "useful_share": 0.96, "samples_lost": 64, "bit_equal": False}
    both = worst([one, other])
    assert (both["useful_share"], both["samples_lost"], both["bit_equal"]) == (0.96, 64, False)
    assert worst([one, {**other, "useful_share": None}])["useful_share"] is None


def test_run_with_faults_lasts_as_long_as_its_faults_take() -> None:
    (hand,) = deal(0, FAULTS, 1)
    steps = steps_for(hand, step_s=0.25)
    assert steps % EPOCH_STEPS == 0
    assert 0.8 * FAULTS * EVERY_S < steps * 0.25 < FAULTS * EVERY_S


def side(folder: Path, steps: list[tuple[int, float]]) -> Ours:
    """A run of three steps that recorded these steps and losses."""
    folder.mkdir()
    job = folder / "job.toml"
    job.write_text("epochs = 1\n")
    made = Ours(Nodes(folder, "token"), folder, 3, job, "torch")
    made.run_folder.mkdir(parents=True)
    records = [{"step": step, "samples": step * BATCH, "loss": loss} for step, loss in steps]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (made.run_folder / "metrics.jsonl").write_text(text)
    return made


@pytest.mark.parametrize(
    ("steps", "lost", "twice"),
    [
        ([(1, 0.3), (2, 0.2), (3, 0.1)], 0, 0),
        ([(1, 0.3), (3, 0.1)], 1, 0),
        ([(1, 0.3), (2, 0.2), (2, 0.2), (3, 0.1)], 0, 1),
        ([(1, 0.3), (2, 0.25), (3, 0.1)], 1, 0),
    ],
    ids=["as it should be", "a step is missing", "a step twice", "a step on other samples"],
)
def test_samples_are_counted_by_position_and_loss(
    tmp_path: Path, steps: list[tuple[int, float]], lost: int, twice: int
) -> None:
    whole = side(tmp_path / "whole", [(1, 0.3), (2, 0.2), (3, 0.1)])
    assert samples(side(tmp_path / "ours", steps), whole) == (lost * BATCH, twice * BATCH)


def test_last_step_is_that_of_the_newest_record(tmp_path: Path) -> None:
    run = side(tmp_path / "one", [(1, 0.3), (2, 0.2)])
    assert (tmp_path / "one" / "one.toml").read_text() == "steps = 3\n", "as long as it is asked to be"
    assert run.last_step() == (1, 2)
    with open(run.run_folder / "metrics.jsonl", "a") as file:
        file.write(
            '{"step": 2, "generation": 2, "checkpoint": "x"}\n{"step": 3, "generation": 2, "loss": 0.1}\n'
        )
        file.write('{"step": 4, "lo')
    assert run.last_step() == (2, 3)


@pytest.mark.skipif(os.geteuid() != 0, reason="a node's name needs root")
def test_lost_node_loses_its_processes_and_cannot_be_reached(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, f"token-{os.getpid()}")
    with ExitStack() as running:
        running.callback(nodes.close)
        first, second = (running.enter_context(on(name, nodes)) for name in ("node-a", "node-b"))
        nodes.lose("node-a", "sleep")
        assert first.wait(60) == 255, "as of an ssh that lost its host"
        assert {process.node for process in nodes.processes()} == {"node-b"}
        again = subprocess.run(
            ["ssh", "node-a", "true"], env=nodes.variables, check=False, stderr=subprocess.PIPE
        )
        assert (again.returncode, b"No route" in again.stderr) == (255, True)
        assert second.poll() is None
        nodes.close()
        assert second.wait(60) == 255
        assert not nodes.processes()


@contextmanager
def on(name: str, nodes: Nodes) -> Iterator["subprocess.Popen[bytes]"]:
    """A process on a node, once it has said the node's name."""
    command = ["ssh", "-o", "BatchMode=yes", name, "uname -n; exec sleep 60"]
    with subprocess.Popen(command, env=nodes.variables, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{name}\n".encode()
        yield process
