"""Functions between a block's products have the gradients of torch's own operations; Triton has the same.

Triton runs in its interpreter, which computes each program on the CPU, in a process of its own: it is chosen
when Triton is imported.
"""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.support.steps import fuse_as_on_a_gpu
from trainer.config import Model
from trainer.model.fused_block import PLAIN, Unsummed, problem_of
from trainer.model.kernels import use_kernels


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_triton_computes_what_the_plain_form_does() -> None:
    """Every function, in the interpreter, as a start tries them on a GPU: lengths, types, kinds and masks."""
    program = (
        "import torch; from trainer.model import fused_block as f; cpu = torch.device('cpu'); "
        "print(f.problem_of(f.fused(cpu), cpu, torch.float32) or 'none')"
    )
    assert interpreted(program) == ["none"]


def interpreted(program: str) -> list[str]:
    """Returns the lines that a program prints whose kernels run in Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


LONG = """
import torch
from trainer.model import long_attention
from trainer.model.fused_block import PLAIN
for tokens, heads, causal in {cases}:
    torch.manual_seed(0)
    joint, grad = torch.randn(1, tokens, 3 * 64), torch.randn(1, tokens, 64)
    joint[..., :128] *= 3  # scores far from 0, as of a trained model
    out, kept = long_attention.attention(joint, heads, causal)
    expected = [
        PLAIN.attention(joint, heads, causal, None)[0],
        *PLAIN.attention_backward(joint, (), grad, heads, causal, None),
    ]
    found = [out, *long_attention.attention_backward(joint, *kept, grad, heads, causal)]
    print(*(float((one - other).norm() / other.norm()) for one, other in zip(found, expected)))
"""
"""Prints the errors of attention, its gradient and the gradient's sum."""


def errors_of(program: str, cases: list[tuple[int, int, bool]]) -> list[list[float]]:
    return [[float(word) for word in line.split()] for line in interpreted(program.format(cases=cases))]


def test_long_attention_in_triton_is_that_of_torch_at_lengths_that_divide_by_no_tile() -> None:
    cases = [(129, 1, False), (196, 2, False), (257, 1, True), (577, 1, False)]
    errors = errors_of(LONG, cases)
    assert len(errors) == len(cases)
    assert all(error < 1e-5 for line in errors for error in line), errors


def test_long_attention_that_few_queries_see_stays_finite() -> None:
    """Weights of keys beyond the last one may be infinite. Nothing else has a part in them."""
    far = LONG.replace("joint[..., :128] *= 3", "joint[..., :64] += 10; joint[..., 64:128] -= 10")
    errors = errors_of(far, [(197, 1, False)])
    assert all(error < 1e-3 for line in errors for error in line), errors


@pytest.mark.parametrize(
    "name", ["norm", "norm_backward", "gelu_backward", "attention", "attention_backward"]
)
def test_a_start_finds_a_function_that_computes_something_else(name: str) -> None:
    def slightly_off(*arguments: Any) -> Any:
        result = getattr(PLAIN, name)(*arguments)
        if name == "attention":
            return 1.05 * result[0], result[1]
        return (result[0], 1.05 * result[1], *result[2:])

    wrong = replace(PLAIN, **{name: slightly_off})  # type: ignore[arg-type]
    assert "differs from that of torch" in problem_of(wrong, torch.device("cpu"))
    assert problem_of(PLAIN, torch.device("cpu")) == ""


def test_what_triton_raises_is_told_and_stops_nothing() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such GPU\nmore lines")

    told = problem_of(replace(PLAIN, attention=broken), torch.device("cpu"))
    assert told == "Triton failed: RuntimeError: no such GPU"


@pytest.fixture
def fused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are fused as on a GPU, with the plain form of the functions."""
    fuse_as_on_a_gpu(monkeypatch)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "usual": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=7),
    "layer scale": lambda: timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, num_classes=7, init_values=0.5
    ),
    "norm of queries and keys": lambda: timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, num_classes=7, qk_norm=True
    ),
}


@pytest.mark.parametrize(
    ("name", "blocks"), [("usual", 2), ("layer scale", 2), ("norm of queries and keys", 0)]
)
@pytest.mark.usefixtures("fused_here")
def test_blocks_of_timm_are_fused_where_that_is_the_same(name: str, blocks: int) -> None:
    """In bfloat16 the fused gradient is as near to that in float64 as the plain one."""
    plain = BLOCKS[name]()
    fused = copy.deepcopy(plain)
    replaced = use_kernels(fused, Model(precision="bf16")).replaced
    assert replaced["fused block"] == blocks
    left = []
    for block in fused.get_submodule("blocks").children():
        block.register_forward_hook(lambda *call: left.append(isinstance(call[2], Unsummed)))
    exact = copy.deepcopy(plain).double()
    images = torch.randn(4, 3, 32, 32)
    expected = of_weights(exact, exact(images.double()))
    errors = []
    for model in (fused, plain):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(images)
        errors.append(float((of_weights(model, out).double() - expected).norm() / expected.norm()))
    assert errors[0] <= 1.2 * errors[1]
    assert left == ([True, False] if blocks else [False, False]), "the first one leaves its sum to the next"


def of_weights(model: nn.Module, out: Tensor) -> Tensor:
    found = torch.autograd.grad((out * torch.linspace(-1, 1, 7)).sum(), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in found])
