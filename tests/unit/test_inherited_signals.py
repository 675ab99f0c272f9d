"""Signals that a process ignores or blocks stay so across exec: ours begin with what they need."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SHOW = "import signal; print(signal.getsignal(signal.SIGCHLD).name, *signal.pthread_sigmask(0, ()))"


def ended(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """The command as a shell starts it that ignores what children do, and blocks requests to stop."""

    def spoil() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGCHLD))

    return subprocess.run(command, preexec_fn=spoil, capture_output=True, text=True, cwd=ROOT)


def test_the_launcher_sees_a_child_that_fails() -> None:
    launcher = [sys.executable, "-m", "trainer.launch.ranks.localrun", "--ranks", "1", "--"]
    assert ended([*launcher, sys.executable, "-c", "raise SystemExit(7)"]).returncode == 7


def test_a_rank_begins_with_no_signal_blocked(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(_SHOW)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['', 'shows']\n"
    program += "from trainer.supervise.rank.rank_start import main; main()"
    assert ended([sys.executable, "-c", program]).stdout == "SIG_DFL\n"
