"""An environment for one side of a benchmark.

Python looks first in its own packages, then in those of the environment that runs this.
"""

import os
import sysconfig
import venv
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipship"
"""Folder of the environments that benchmarks keep."""


def environment(home: Path) -> Path:
    """Makes it, in place of what may be there; returns its Python, which has pip."""
    venv.create(home, clear=True, with_pip=True)
    share(home)
    return home / "bin" / "python"


def share(home: Path) -> None:
    """Lets an environment that may be older use the packages of the environment that runs this."""
    inside = next((home / "lib").glob("python*/site-packages"))
    (inside / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
