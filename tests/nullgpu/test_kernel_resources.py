"""Kernels fit the GPUs that they are compiled for: shared memory, and registers that spill into memory."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED = 99 * 2**10
"""Bytes of shared memory that a block may have on every GPU since compute capability 8.0."""
HOPPER, BLACKWELL = 90, 100


@pytest.mark.parametrize(("capability", "spilled"), [("8.0", 736), ("9.0", 80), ("10.0", 32)])
def test_kernels_of_fused_blocks_fit_a_gpu(tmp_path: Path, capability: str, spilled: int) -> None:
    """Attention's gradients take all registers that they may, and spill so many bytes of a thread."""
    command = [sys.executable, "-m", "tests.support.compiled_kernels"]
    environment = {**os.environ, "NULLGPU_SM": capability, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    kernels = list(compiled(tmp_path))
    names = {kernel["name"] for kernel in kernels}
    assert {"_norm_forward", "_norm_backward", "_gelu_backward", "_attention_backward"} < names
    assert ("_keys_backward" in names) is (capability == "9.0")
    for kernel in kernels:
        assert kernel["shared"] <= SHARED, kernel
        stores, loads = spills(kernel)
        allowed = spilled if kernel["name"] in ("_attention_backward", "_keys_backward") else 4
        assert max(loads, stores) <= allowed, kernel


def compiled(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields what Triton says of each kernel in its cache, and `ptx`, its code."""
    for path in folder.glob("*/*.json"):
        about = json.loads(path.read_text())
        if "shared" in about:
            yield {**about, "ptx": path.with_suffix(".ptx")}


def spills(kernel: dict[str, Any]) -> tuple[int, int]:
    """Returns the bytes that a thread of the kernel stores and loads for want of registers, by ptxas."""
    arch, most = kernel["target"]["arch"], kernel["maxnreg"]
    done = subprocess.run(
        [
            str(TOOLS / ("ptxas-blackwell" if arch >= BLACKWELL else "ptxas")),
            *("-v", f"--gpu-name=sm_{arch}{'a' if arch >= HOPPER else ''}", "-o", os.devnull),
            *([f"--maxrregcount={most}"] if most else []),
            str(kernel["ptx"]),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr + done.stdout)
    assert found is not None, done.stderr
    return int(found[1]), int(found[2])
