"""A step goes from a node without a rank to rank 0 by way of the run folder, or rank 0 hears of a failure."""

import json
import threading
import time
from pathlib import Path

import pytest

from trainer.run.generations import remove_handed_over
from trainer.supervise.coordinate.membership import WorldPlan, source_of
from trainer.world.handover import give, take
from trainer.world.state_parts import Header, data_file, layout_file, newest_step, write_header

START = "the start"
LAYOUT = "0123456789abcdef"
BYTES = bytes(range(256)) * 64
NODES = {0: "a", 1: "a", 2: "b", 3: "c"}


def go_on() -> bool:
    return True


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A node's memory with step 7, which two ranks have kept."""
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / layout_file(LAYOUT)).write_text(json.dumps({}))
    (folder / data_file(LAYOUT, 1)).write_bytes(BYTES)
    (folder / data_file(LAYOUT, 0)).write_bytes(b"of an older step")
    for part in range(2):
        write_header(folder, Header(START, LAYOUT, 1, 7, part, 2, "sum"))
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("kept", "world", "saved", "source"),
    [
        ({0: 7, 3: 0}, {3: "c"}, 4, (7, 0)),
        ({0: 7, 1: 7, 3: 0}, {3: "c"}, 4, (7, 0)),
        ({0: 7, 3: 0}, {3: "c"}, 7, (7, None)),
        ({0: 7, 3: 0}, {3: "c"}, 9, (9, None)),
        ({0: 7, 2: 6}, {2: "b", 3: "c"}, 4, (6, None)),  # one step is sooner done again than copied
        ({0: 7, 2: 3}, {2: "b", 3: "c"}, 4, (7, 0)),
        ({0: 6, 1: 7}, {0: "a"}, 4, (7, None)),  # members 0 and 1 share a node
        ({}, {3: "c"}, 4, (4, None)),
    ],
)
def test_who_hands_which_step_over(
    kept: dict[int, int], world: dict[int, str], saved: int, source: tuple[int, int | None]
) -> None:
    assert source_of(kept, NODES, WorldPlan(tuple(world.items())), saved) == source


def test_newest_whole_step_arrives_with_all_its_files_alone(memory: Path, run_folder: Path) -> None:
    give(run_folder, 3, memory, START, go_on)
    taken = take(run_folder, 3, longest_s=0.0)
    assert taken is not None
    assert newest_step(taken, START) == 7
    assert (taken / data_file(LAYOUT, 1)).read_bytes() == BYTES
    assert len(list(taken.iterdir())) == 4, "layout, bytes and two headers"
    remove_handed_over(run_folder)
    assert list(run_folder.iterdir()) == []


def test_rank_0_waits_for_a_step_that_comes_late(memory: Path, run_folder: Path) -> None:
    later = threading.Timer(0.5, give, (run_folder, 3, memory, START, go_on))
    later.start()
    taken = take(run_folder, 3, longest_s=30.0)
    later.join()
    assert taken is not None
    assert newest_step(taken, START) == 7


def test_rank_0_waits_no_longer_than_it_may(run_folder: Path) -> None:
    (run_folder / "handed-over" / "00003.part").mkdir(parents=True)
    began = time.monotonic()
    assert take(run_folder, 3, longest_s=0.3) is None
    assert time.monotonic() - began >= 0.3


def test_failure_leaves_an_empty_folder_so_rank_0_waits_no_longer(memory: Path, run_folder: Path) -> None:
    (memory / data_file(LAYOUT, 1)).unlink()
    with pytest.raises(FileNotFoundError):
        give(run_folder, 3, memory, START, go_on)
    taken = take(run_folder, 3, longest_s=0.0)
    assert taken is not None
    assert list(taken.iterdir()) == []
    with pytest.raises(FileNotFoundError, match="no whole step"):
        give(run_folder, 4, memory, "another start", go_on)
    assert take(run_folder, 4, longest_s=0.0) is not None


def test_giver_that_is_not_wanted_any_more_touches_nothing(memory: Path, run_folder: Path) -> None:
    give(run_folder, 4, memory, START, go_on)
    give(run_folder, 3, memory, START, lambda: False)
    assert [path.name for path in (run_folder / "handed-over").iterdir()] == ["00004"]


def test_giver_stops_in_the_middle_once_it_is_not_wanted(memory: Path, run_folder: Path) -> None:
    answers = iter([True, True, False])
    give(run_folder, 3, memory, START, lambda: next(answers))
    assert take(run_folder, 3, longest_s=0.0) is None
    give(run_folder, 4, memory, START, go_on)
    assert [path.name for path in (run_folder / "handed-over").iterdir()] == ["00004"], "the old part is gone"


def test_link_in_the_run_folder_is_not_followed(memory: Path, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run_folder / "handed-over").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError, match="is a link"):
        give(run_folder, 3, memory, START, go_on)
    assert not list((tmp_path / "elsewhere").rglob("*.data"))
