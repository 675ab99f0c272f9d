"""Children that have ended are taken note of, and nobody waits for one that runs."""

import os
import subprocess
import time
from typing import Any

import pytest

from trainer.sysinfo import children


def ended(code: int) -> int:
    child = os.posix_spawnp("sh", ["sh", "-c", f"exit {code}"], os.environ)
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.001)
    return child


def test_children_that_have_ended_are_reaped_with_their_codes() -> None:
    first, second = ended(3), ended(0)
    assert children.reap(first) | children.reap(second) == {first: 3, second: 0}
    assert not children.is_child(first)


def test_one_of_others_that_ends_meanwhile_is_left_to_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    own = subprocess.Popen(["sleep", "60"])
    orphan = ended(3)
    look = os.waitid

    def look_and_end_own(kind: int, which: int, options: int) -> Any:
        found = look(kind, which, options)
        own.send_signal(9)
        while look(os.P_PID, own.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.001)
        return found

    monkeypatch.setattr(os, "waitid", look_and_end_own)
    assert children.reap(but={own.pid}) == {orphan: 3}
    assert own.wait() == -9
