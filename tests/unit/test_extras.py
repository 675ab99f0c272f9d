"""Environments that lack an extra: a command does what it can, or says in one sentence what to install."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.jobs import VIT, tiny_job
from trainer.model.build import untrained
from trainer.sysinfo.extras import EXTRAS

WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, *others):
        return None if name.partition(".")[0] in {modules!r} else self._finder.find_spec(name, *others)

sys.meta_path = [Without(finder) for finder in sys.meta_path]
"""
"""Begins a program that cannot import some modules."""


def run(code: str, *extras: str) -> subprocess.CompletedProcess[str]:
    modules = {module for extra in extras for module in EXTRAS[extra] if "." not in module}
    modules |= {"tokenizers"} if "text" in extras else set()  # transformers brings it
    program = WITHOUT.format(modules=modules) + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("form", "said"), [("open_clip", "wrote open_clip"), ("safetensors", "wrote"), ("hf", "clipship[text]")]
)
def test_export_without_the_extra_text(tmp_path: Path, form: str, said: str) -> None:
    torch.save(untrained(tiny_job()).model.state_dict(), tmp_path / "weights.pt")
    arguments = ["export", str(tmp_path / "weights.pt"), str(tmp_path / "out"), "--to", form, "--model", VIT]
    done = run(f"from trainer.cli.main import main; sys.exit(main({arguments!r}))", "text")
    assert "Traceback" not in done.stderr
    assert said in done.stderr
    assert done.returncode == (2 if form == "hf" else 0)
