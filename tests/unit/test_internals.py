"""Private parts of other packages: one module touches them, and a release that changes one fails here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer import internals

ROOT = Path(__file__).parents[2]
PUBLIC = {"_asdict", "_exit", "_fields", "_make", "_replace"}
"""Names with an underscore that Python documents."""
OURS = ("trainer", "tests", "benchmarks", "tools", "__future__")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC | {"_"}


def own_names(tree: ast.AST) -> Iterator[str]:
    """Private names that a module defines: functions, attributes of its own objects, fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def touched(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """Lines and names of what a module touches of others, but for what `own` defines."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".") if is_private(part)]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in OURS:
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            names = [part for part in parts if is_private(part)]
        elif isinstance(node, ast.Attribute) and node.attr not in own and is_private(node.attr):
            names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            names = constants(node.args[1], own)
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("vars("):
            names = constants(node.slice, own)
        yield from ((node.lineno, name) for name in names)  # type: ignore[attr-defined]


def constants(node: ast.expr, own: set[str]) -> list[str]:
    value = node.value if isinstance(node, ast.Constant) else None
    return [value] if isinstance(value, str) and is_private(value) and value not in own else []


def trees() -> dict[str, ast.AST]:
    paths = (path for folder in ("trainer", "tools") for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def test_no_other_module_touches_private_parts() -> None:
    modules = trees()
    assert len(modules) > 400
    assert len(list(touched(modules.pop("trainer/internals.py"), set()))) > 10
    del modules["tools/nullgpu/__init__.py"]  # it takes the place of torch's own kernels
    own = {name for tree in modules.values() for name in own_names(tree)}
    assert {path: found for path, tree in modules.items() if (found := list(touched(tree, own)))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._prims_common import suggest_memory_format",
        "from torch.utils.data import _utils",
        "torch._foreach_copy_(a, b)",
        "scaler._found_inf_per_device(optimizer)",
        'getattr(config, "_attn_implementation", None)',
        'vars(process)["_config"]',
    ],
)
def test_a_private_part_is_found(line: str) -> None:
    assert len(list(touched(ast.parse(line), {"_own"}))) == 1
    assert list(touched(ast.parse("module._own = os._exit, row._replace(a=1), x.__name__"), {"_own"})) == []


def test_code_is_named_by_imports_and_not_by_texts() -> None:
    """A text such as "module:function" hides an import from mypy and from the linter of layers."""
    for path, tree in trees().items():
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        named = [text for text in texts if re.fullmatch(r"trainer(\.\w+)+:\w+", str(text))]
        assert named == [], path


def test_torch_names_the_gpus_that_it_was_built_for() -> None:
    assert re.fullmatch(r"(sm_\d+\w? ?|compute_\d+\w? ?)*", internals.architectures_in_torch())
