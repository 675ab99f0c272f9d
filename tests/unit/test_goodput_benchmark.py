"""The figures of `make bench-goodput`: which faults it draws, and what it makes of what it saw."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.goodput_faults import EVERY_S, EXTRA_KINDS, FAULTS, KINDS, OF_NODES, Fault, deal, made
from benchmarks.goodput_figures import samples
from benchmarks.goodput_limits import LIMITS, missed
from benchmarks.goodput_nodes import Nodes
from benchmarks.goodput_run import _COMMIT
from benchmarks.goodput_sides import BATCH, Ours
from benchmarks.goodput_story import Moment, Seen, Story


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
    with open(run.run_folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "generation": 2, "loss": 0.1}\n{"step": 4, "lo')
    assert run.last_step() == (2, 3)
