"""Ctrl-C at a real terminal, on a real run of two ranks.

In every part of a run's life, the terminal shows at once what happens next.
"""

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.ends import write_job
from tests.support.terminal import END_S, Terminal

AT_ONCE_S = 20.0
"""Limit for an answer to a key, which takes milliseconds. What it must not wait for lasts longer here."""
CTRL_C = b"\x03"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def begin(fault: str = "", **sections: object) -> Terminal:
        job = write_job(tmp_path, "torch", "clipship", fault, steps=100_000, **sections)
        module = (
            ["tests.support.ends", str(job), "2"]
            if fault
            else ["trainer.cli.main", "run", str(job), "--nproc", "2"]
        )
        opened.append(Terminal([sys.executable, "-m", *module]))
        return opened[-1]

    yield begin
    for terminal in opened:
        terminal.close()


def steps_logged(tmp_path: Path) -> int:
    metrics = tmp_path / "runs" / "ends" / "metrics.jsonl"
    return metrics.read_text().count('"loss"') if metrics.exists() else 0


def test_ctrl_c_says_at_which_step_the_run_saves_and_leaves(
    tmp_path: Path, start: Callable[..., Terminal]
) -> None:
    terminal = start(checkpoint={"every_steps": 1000})
    terminal.until(lambda: steps_logged(tmp_path) > 3)
    terminal.press(CTRL_C)
    pattern = (
        r"Ctrl-C in (?:the \w+ of )?step (\d+): saving at about step (\d+), then exiting; "
        r"press Ctrl-C again to exit at once"
    )
    said = terminal.shows(pattern, AT_ONCE_S)
    assert terminal.end() == 75, terminal.text
    saved = int(terminal.shows(r"asked to stop: step (\d+) of", 1)[1])
    assert int(said[2]) == int(said[1]) + 2
    assert int(said[1]) <= saved  # how much later depends on how fast the steps are
    assert (tmp_path / "runs" / "ends" / "checkpoints" / f"step-{saved:08d}").is_dir()


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        pytest.param("absent:all:start:0", "starting ranks  ", id="launcher"),
        pytest.param("slow:0:first step:1", "first step  ", id="ranks"),
    ],
)
def test_ctrl_c_before_the_first_step_leaves_with_nothing_saved(
    tmp_path: Path, start: Callable[..., Terminal], fault: str, shown: str
) -> None:
    """Faults hold the supervisors before they begin, and rank 0 in its first step."""
    terminal = start(fault)
    terminal.shows(shown, END_S)
    terminal.press(CTRL_C)
    terminal.shows("Ctrl-C before the first step is done: there is nothing to save, exiting", AT_ONCE_S)
    assert terminal.end() == (75 if shown.startswith("first") else 130), terminal.text
    assert not steps_logged(tmp_path)


def test_ctrl_c_while_the_job_is_checked_says_that_nothing_was_started(
    tmp_path: Path, start: Callable[..., Terminal]
) -> None:
    """Its data is on a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        shard = f"http://127.0.0.1:{silent.getsockname()[1]}/0.tar"
        terminal = start(data={"format": "webdataset", "train": (shard,)})
        terminal.shows("checking .*job.toml", END_S)
        terminal.press(CTRL_C)
        terminal.shows("clipship: Ctrl-C: nothing was started", AT_ONCE_S)
        assert terminal.end() == 128 + signal.SIGINT, terminal.text
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_twice_leaves_at_once_though_a_checkpoint_is_being_saved(
    tmp_path: Path, start: Callable[..., Terminal]
) -> None:
    terminal = start("slow:1:checkpoint:2", timeouts={"checkpoint_s": 500.0})
    terminal.until((tmp_path / "moment").exists)
    terminal.press(CTRL_C)
    terminal.shows(
        r"Ctrl-C in (the checkpoint of )?step 2: saving at about step 4, then exiting; press Ctrl-C again",
        AT_ONCE_S,
    )
    terminal.press(CTRL_C)
    terminal.shows("Ctrl-C again: exiting at once, nothing more is saved", AT_ONCE_S)
    assert terminal.end() == 128 + signal.SIGINT, terminal.text
