"""The figures of `make bench-goodput`: which faults it draws, and what it makes of what it saw."""

import itertools
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.goodput import samples
from benchmarks.goodput_faults import EVERY_S, KINDS, faults
from benchmarks.goodput_nodes import Nodes
from benchmarks.goodput_run import Moment, Seen, Story
from benchmarks.goodput_sides import BATCH, Ours


def test_every_kind_comes_at_one_fault_in_a_minute() -> None:
    drawn = list(itertools.islice(faults(3), 3 * len(KINDS)))
    assert Counter(fault.kind for fault in drawn) == dict.fromkeys(KINDS, 3)
    made = sum(KINDS[fault.kind] for fault in drawn)
    assert abs(drawn[-1].at_s - made * EVERY_S) <= 2 * EVERY_S
    assert [fault.at_s for fault in drawn] == sorted(fault.at_s for fault in drawn)


def test_seed_decides_faults_and_victims() -> None:
    first, again, other = ([*itertools.islice(faults(seed), 20)] for seed in (1, 1, 2))
    assert first == again != other


def story(*seen: tuple[float, int, int, int]) -> Story:
    return Story(seen=[Seen(*each) for each in seen])


def test_recovery_ends_with_the_first_new_step_of_new_ranks() -> None:
    """Step 4 is recorded after the kill, step 4 comes again, and step 5 is new."""
    told = story((1, 1, 1, 3), (2.1, 1, 1, 4), (6, 1, 2, 4), (7, 1, 2, 5), (8, 1, 2, 6))
    assert told.recovery_s(Moment(2.0, "rank killed", False)) == 5.0


def test_recovery_of_a_run_that_was_started_again_counts_its_generations_anew() -> None:
    told = story((1, 1, 2, 30), (60, 2, 1, 30), (61, 2, 1, 31))
    assert told.recovery_s(Moment(2.0, "node lost", True)) == 59.0


def test_fault_in_a_recovery_is_measured_to_the_same_step() -> None:
    told = story((1, 1, 1, 3), (9, 1, 3, 4))
    assert [told.recovery_s(Moment(at_s, "", False)) for at_s in (2.0, 5.0)] == [7.0, 4.0]


def test_run_that_never_went_on_has_no_recovery() -> None:
    assert story((1, 1, 1, 3), (2.5, 1, 1, 4)).recovery_s(Moment(2.0, "", False)) is None


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


def test_side_is_as_long_as_it_is_asked_to_be(tmp_path: Path) -> None:
    side(tmp_path / "one", [])
    assert (tmp_path / "one" / "one.toml").read_text() == "steps = 3\n"


def test_last_step_is_that_of_the_newest_record(tmp_path: Path) -> None:
    run = side(tmp_path / "one", [(1, 0.3), (2, 0.2)])
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
