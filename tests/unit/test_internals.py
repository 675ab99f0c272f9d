"""Private parts of other packages: one module touches them, and a release that changes one fails here."""

import ast
import inspect
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.support.ready import ready
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
    found = {
        path: texts
        for path, tree in trees().items()
        if (
            texts := [
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"trainer(\.\w+)+:\w+", node.value)
            ]
        )
    }
    assert found == {}


def test_torch_resizes_into_memory_that_is_given() -> None:
    pixels = torch.randint(0, 256, (1, 60, 70, 4), dtype=torch.uint8).permute(0, 3, 1, 2)
    out = torch.empty(1, 32, 24, 4, dtype=torch.uint8).permute(0, 3, 1, 2)
    internals.resize_into(pixels, out)
    assert torch.equal(out, F.interpolate(pixels, size=(32, 24), mode="bicubic", antialias=True))


def test_torch_copies_and_moves_many_tensors_at_once() -> None:
    targets = [torch.zeros(3), torch.zeros(2, 2)]
    internals.move_all(targets, [torch.ones(3), torch.full((2, 2), 4.0)], torch.tensor(0.25))
    assert [target.flatten()[0].item() for target in targets] == [0.25, 1.0]
    internals.copy_all(targets, (torch.ones(3), torch.ones(2, 2)), non_blocking=True)
    assert all(bool((target == 1).all()) for target in targets)


def test_torchs_scaler_keeps_its_marks_and_numbers_on_the_device() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=True)
    scaler = torch.amp.GradScaler("cpu")
    assert [internals.scaler_tensor(scaler, name) for name in internals.SCALER_TENSORS] == [None, None]
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    assert [mark.item() for mark in internals.found_inf(scaler, optimizer)] == [0.0]
    for name, number in internals.SCALER_TENSORS.items():
        assert internals.scaler_tensor(scaler, name) == scaler.state_dict()[number]


def test_torchs_optimizers_say_whether_they_leave_steps_out() -> None:
    weights = [torch.nn.Parameter(torch.ones(2))]
    assert internals.leaves_out_by_itself(torch.optim.AdamW(weights, fused=True))
    assert not internals.leaves_out_by_itself(torch.optim.AdamW(weights))


def test_torch_names_the_gpus_that_it_was_built_for() -> None:
    assert re.fullmatch(r"(sm_\d+\w? ?|compute_\d+\w? ?)*", internals.architectures_in_torch())


def test_torchs_compiler_has_its_settings() -> None:
    from torch._dynamo import config as graphs
    from torch._inductor import config as kernels

    with graphs.patch(recompile_limit=8), kernels.patch(compile_threads=2):
        internals.allow_graphs(20)
        internals.allow_graphs(10)
        internals.compile_in_this_process()
        assert (graphs.cache_size_limit, kernels.compile_threads) == (20, 1)


def test_transformers_configs_say_how_they_compute_attention() -> None:
    config = pytest.importorskip("transformers").BertConfig(attn_implementation="eager")
    assert internals.attention_of(config) == "eager"


def test_multiprocessing_starts_its_server_by_the_function_that_is_replaced() -> None:
    with internals.spawning_by(lambda path, arguments, kept: 7):
        assert multiprocessing.util.spawnv_passfds(b"", [], []) == 7
    assert multiprocessing.util.spawnv_passfds is internals.spawn
    assert list(inspect.signature(internals.spawn).parameters) == ["path", "args", "passfds"]
    assert "util.spawnv_passfds(exe, args, fds_to_pass)" in inspect.getsource(multiprocessing.forkserver)


def test_multiprocessing_names_semaphores_and_sockets_as_it_is_told(tmp_path: Path) -> None:
    """Another process tries it: joblib, which some tests import, names semaphores in its own way."""
    program = """
import multiprocessing, sys
from trainer import internals

internals.name_resources("/ours", sys.argv[1])
print(multiprocessing.util.get_temp_dir(), multiprocessing.get_context("forkserver").Lock()._semlock.name)
"""
    shown = ready("trainer.internals").run(program, str(tmp_path), folder=tmp_path)
    folder, name = shown.stdout.split()
    assert folder == str(tmp_path)
    assert name.startswith("/ours-")


def test_torch_looks_after_loader_processes_as_often_as_it_is_told() -> None:
    look = _MultiProcessingDataLoaderIter._try_get_data
    before = look.__defaults__
    try:
        assert _utils.MP_STATUS_CHECK_INTERVAL == internals.TORCHS_LOOK_S
        look.__defaults__ = (internals.TORCHS_LOOK_S,)
        internals.look_every(0.5)
        assert look.__defaults__ == (0.5,)
        assert list(inspect.signature(look).parameters) == ["self", "timeout"]
    finally:
        look.__defaults__ = before
