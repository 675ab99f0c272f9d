"""The command's process: Ctrl-C during its imports, and what its terminal cannot show."""

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


_ESCAPE_PRINTED = """\
import sys
from trainer.cli import entry, main as command_line
command_line.main = lambda: print("d\\udcff") or 0
sys.exit(entry.main())
"""


def test_ctrl_c_during_the_imports_leaves_no_traceback() -> None:
    end = subprocess.run([sys.executable, "-c", _INTERRUPTED_IMPORT], capture_output=True, text=True)
    assert (end.returncode, end.stderr) == (130, "")


def test_a_name_that_is_no_utf_8_keeps_its_bytes_where_the_locale_passes_them() -> None:
    end = subprocess.run(
        [sys.executable, "-c", _ESCAPE_PRINTED], env={"LC_ALL": "C"}, capture_output=True, check=False
    )
    assert end.stdout == b"d\xff\n", end.stderr
