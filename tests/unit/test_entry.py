"""Ctrl-C while the command's modules are imported."""

import subprocess
import sys

_INTERRUPTED_IMPORT = """\
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "trainer.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from trainer.cli.entry import main
sys.exit(main())
"""


def test_ctrl_c_during_the_imports_leaves_no_traceback() -> None:
    end = subprocess.run([sys.executable, "-c", _INTERRUPTED_IMPORT], capture_output=True, text=True)
    assert (end.returncode, end.stderr) == (130, "")
