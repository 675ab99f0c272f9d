"""The command `clipship stacks`: the table of versions that go together, and why.

Reads docker/stacks.toml; uses no network and no torch.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from trainer.cli.options import Group
from trainer.cli.output import print_lines
from trainer.text.fitting import terminal_columns
from trainer.text.table import aligned, by_topic, without

if TYPE_CHECKING:
    from trainer.config.stack_table import StackRow, StackTable

_LEAST_WANTED = ("C++", "cuDNN", "torchvision", "GPUs", "NCCL")
"""Columns that a narrow terminal loses, in this order."""


@click.group(cls=Group, invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List the stacks that an image can be built from: torch, and all versions that follow from it.

    Examples:
      clipship stacks
      clipship stacks explain 2.14.1
    """
    if ctx.invoked_subcommand is None:
        columns = terminal_columns(sys.stdout)
        for line in aligned(without(list(_rows()), _LEAST_WANTED, columns), columns):
            click.echo(line)


@command.command()
@click.argument("name", metavar="TORCH")
def explain(name: str) -> None:
    """Explain what follows from a torch release: CUDA, NCCL, compilers, drivers, GPUs, bases."""
    print_lines(by_topic(_explain(name)))


def _rows() -> Iterator[tuple[str, ...]]:
    from trainer.config.stack_table import table

    known = table()
    yield "torch", "torchvision", "Python", "CUDA", "cuDNN", "NCCL", "C++", "GPUs", ""
    for row in known.rows:
        gpus = f"{row.archs[0]} to {row.archs[-1]}"
        marks = ["default"] if row.torch == known.default else []
        if row.built:
            marks += ["image built here" if row.built[0].startswith("the image") else "tests passed here"]
        marks += [] if known.trains(row) else ["too old for the trainer"]
        marks += ["known bad: see explain"] if row.known_bad else []
        pythons = f"{row.python[0]}-{row.python[1]}"
        yield (
            row.torch,
            row.torchvision,
            pythons,
            row.cuda,
            row.cudnn.rpartition(".")[0],
            row.nccl,
            str(row.cxx),
            gpus,
            ", ".join(marks),
        )


def _explain(name: str) -> Iterator[tuple[str, str]]:
    from trainer.config.stack_table import table
    from trainer.image.toolchain import bases

    known = table()
    row = known.row(name)
    cuda = known.cuda[row.cuda]
    fitting = bases(row, known)
    yield from [
        ("torch", f"{row.torch}, with torchvision {row.torchvision}, triton {row.triton}"),
        (
            "Python",
            (
                f"{row.python[0]} to {row.python[1]}: what the index has wheels for; the trainer needs "
                f"{known.trainer_python_min}"
            ),
        ),
        ("CUDA", f"{row.cuda}, cuDNN {row.cudnn}: the wheel's own libraries; the base needs none"),
        (
            "NCCL",
            (
                f"{row.nccl}: the wheel pins it, and Horovod is linked to the same file, so that the process "
                f"has one{_newer(known.newer_nccls(row))}"
            ),
        ),
        ("driver", _driver(row, known)),
        ("GPUs", f"compute capability {', '.join(row.archs)}: what the wheel has code for"),
        ("linux/arm64", _arm64(row)),
        ("C++", f"{row.cxx}: torch's headers ask for it; Horovod is built as that"),
        (
            "Horovod",
            f"{known.horovod}, built as C++{row.cxx}; docker/build-horovod.sh says what it edits, and why",
        ),
        (
            "ABI",
            "libstdc++'s new strings"
            if row.cxx11_abi
            else "libstdc++'s old strings; Horovod's build follows torch",
        ),
        ("g++", f"up to {cuda.gcc_max}: nvcc {row.cuda} refuses a newer one"),
        ("nvcc", f"from {', '.join(cuda.nvcc)}; in the build stage alone"),
        ("glibc", f"{row.glibc} or newer: the wheels' platform tag"),
        ("setuptools", row.setuptools or "any"),
        ("numpy", row.numpy or "any"),
        ("bases", ", ".join(fitting) if fitting else "none of the systems in the table"),
        (
            "trainer",
            "runs on it"
            if known.trains(row)
            else f"needs torch {known.trainer_torch_min} or newer: {known.trainer_torch_why}",
        ),
        *(("known bad", bad.text) for bad in row.known_bad),
        *(("note", note) for note in row.notes),
        *(("built here", text) for text in row.built or ("no",)),
    ]


def _newer(versions: list[str]) -> str:
    return "".join(f'; stack.nccl = "{version}" puts a newer one in its place' for version in versions)


def _arm64(row: "StackRow") -> str:
    if not row.archs_arm64:
        return "its wheel has no CUDA"
    return f"compute capability {', '.join(row.archs_arm64)}"


def _driver(row: "StackRow", known: "StackTable") -> str:
    floor = known.cuda[row.cuda].driver_min
    later = {arch: known.driver_of_gpu(arch) for arch in row.archs if known.driver_of_gpu(arch) > floor}
    of_gpus = "".join(f"; {driver} for GPUs of {arch}" for arch, driver in later.items())
    return (
        f"{floor} or newer: every driver of CUDA {row.cuda_major} runs every release of that major{of_gpus}"
    )
