"""A process forks where its child is whole, whatever threads its libraries have started."""

import subprocess
import sys

import pytest

PROGRAM = """
import threading
from pathlib import Path
from trainer.sysinfo.forks import can_fork

def idle(name):
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
    named.set()
    threading.Event().wait()

for name in NAMES:
    named = threading.Event()
    threading.Thread(target=idle, args=(name,), daemon=True).start()
    named.wait()
print(can_fork())
"""


@pytest.mark.parametrize(
    ("names", "found"),
    [([], True), (["jemalloc_bg_thd"], True), (["worker"], False), (["jemalloc_bg_thd", "worker"], False)],
)
def test_a_process_forks_unless_a_thread_would_be_lost(names: list[str], found: bool) -> None:
    program = PROGRAM.replace("NAMES", repr(names))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{found}\n"
