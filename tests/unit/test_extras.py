"""Environments that lack an extra: a command does what it can, or says in one sentence what to install."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.jobs import VIT, tiny_job
from tests.support.pages import ROOT
from trainer.model.build import untrained
from trainer.sysinfo.extras import EXTRAS, missing_extra

OF_NO_EXTRA = {
    *("braceexpand", "click", "jinja2", "markupsafe", "packaging", "pydantic", "tomli_w", "yaml"),
    *("horovod", "onnxruntime", "peft", "sklearn", "triton"),
}
"""Packages that every installation has, and those that are tried before they are imported."""
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


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Names of the modules that a file imports, and the column in which each import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.col_offset
        elif isinstance(node, ast.Import):
            yield from ((name.name, node.col_offset) for name in node.names)


def run(code: str, *extras: str) -> subprocess.CompletedProcess[str]:
    modules = {module for extra in extras for module in EXTRAS[extra] if "." not in module}
    modules |= {"tokenizers"} if "text" in extras else set()  # transformers brings it
    program = WITHOUT.format(modules=modules) + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_every_package_that_is_imported_has_a_sentence() -> None:
    names = {name.partition(".")[0] for path in (ROOT / "trainer").rglob("*.py") for name, _ in imports(path)}
    foreign = names - set(sys.stdlib_module_names) - {"trainer"} - OF_NO_EXTRA
    assert {name for name in foreign if not missing_extra(name)} == set()


def test_commands_import_no_extra_before_they_need_it() -> None:
    """But those of a cluster, which are of no use without its client."""
    modules = {
        name
        for path in (ROOT / "trainer" / "cli").glob("*.py")
        for name, column in imports(path)
        if column and name.startswith("trainer.") and ".kubernetes" not in name
    }
    code = f"import importlib\nfor name in {sorted(modules)}: importlib.import_module(name)"
    done = run(code, *(extra for extra in EXTRAS if extra != "train"))
    assert done.returncode == 0, done.stderr[-2000:]


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
