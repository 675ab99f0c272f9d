"""Code that means the accelerator asks its row; only what is made for CUDA names CUDA."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import trainer

ROOT = Path(trainer.__path__[0])
OF_CUDA = ("image", "from_open_clip")
"""Folders that speak of CUDA throughout: what an image holds, and the flags of a program for CUDA."""

TEXT = re.compile(
    r"^(cuda|cuda:\d+|nccl|hccl|npu|--nv|--rocm)$|_VISIBLE_DEVICES|/dev/(nvidia|kfd|davinci)|nvidia-smi|"
    r"(nvidia|amd)\.com/gpu"
)

ALLOWED: dict[str, str] = {
    "sysinfo/accelerators.py": "the table",
    "sysinfo/nvml.py": "the library that a row names as its monitor",
    "sysinfo/variables.py": "the names of NCCL's own variables",
    "config/image.py": "what the image, which is one of CUDA, sets and holds",
    "config/stack_table.py": "versions of CUDA and NCCL that go together",
    "config/fabrics.py": "versions of NCCL that a network needs",
    "config/resources.py": "the names of rows, which the job file's model lists",
    "config/comm.py": "the choice of NCCL itself",
    "config/kubernetes.py": "an example in a message",
    "comm/torch_backend.py": "the version of NCCL, for the records",
    "comm/horovod_backend.py": "what Horovod was built with",
    "checkpoint/memory_keeper.py": "memory that ranks share, pinned by CUDA's own call",
    "preflight/host_probe.py": "counters that NVML alone has",
    "train/same_environment.py": "versions of CUDA, cuDNN, NCCL and NVIDIA's driver, for the records",
    "model/sync_batch_norm.py": "kernels of CUDA",
    "model/cuda_graphs.py": "CUDA graphs",
    "model/kernels.py": "kernels that were measured on CUDA",
    "model/triton_kernels.py": "sizes of CUDA's multiprocessors",
    "cli/image.py": "versions that an image holds",
}
"""Files that name CUDA itself, each with what it means."""


def named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the lines, outside docstrings, that name one accelerator, each with the name."""
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            if found := TEXT.search(node.value):
                yield node.lineno, found[0]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.cuda", "torch.version.cuda"):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Attribute) and node.attr == "is_cuda":
            yield node.lineno, ".is_cuda"
        elif isinstance(node, ast.Import) and any(name.name == "pynvml" for name in node.names):
            yield node.lineno, "pynvml"


def found_in(path: Path) -> list[tuple[int, str]]:
    return sorted(named(ast.parse(path.read_text())))


def test_only_what_is_made_for_cuda_names_it() -> None:
    files = {str(path.relative_to(ROOT)): path for path in ROOT.rglob("*.py")}
    looked = {name: path for name, path in files.items() if not name.startswith(OF_CUDA)}
    assert len(looked) > 300
    names = {name: lines for name, path in looked.items() if (lines := found_in(path))}
    assert {name: lines for name, lines in names.items() if name not in ALLOWED} == {}
    assert ALLOWED.keys() - names.keys() == set(), "these name no accelerator any more"


def test_a_name_is_found_wherever_it_stands() -> None:
    lines = (
        '"""torch.cuda and CUDA_VISIBLE_DEVICES may stand in a docstring."""',
        'on_gpu = device.type == "cuda"',
        "torch.cuda.synchronize()",
        'hidden = env.get("HIP_VISIBLE_DEVICES")',
        "if tensor.is_cuda: import pynvml",
        'group = dist.new_group(backend="nccl")',
        "is_cuda(device)",
    )
    assert sorted(line for line, _ in named(ast.parse("\n".join(lines)))) == [2, 3, 4, 5, 5, 6]
