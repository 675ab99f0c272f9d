"""The shell commands that README and docs/ show, with the output below each, and how to run them.

A fenced block marked `console` holds commands. A line that begins with `$` and a blank is one, lines below it
that begin with `>` and a blank continue it, and its output follows. In output, `...` stands for any text, a
line of `...` for any lines. A line of `^C` means that Ctrl-C is pressed when the lines above it are there.
A comment above a block says more:

- `<!-- needs: slurm -->`: a laptop alone cannot run it;
- `<!-- file: job.toml -->`: the reader saves the block under that name;
- `<!-- append: job.toml -->`: the block goes to that file's end.
"""

import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS = {"checkout", "docker", "horovod", "hosts", "kubernetes", "minutes", "slurm"}
"""Needs that a block may name: a checkout, a daemon, Horovod, other machines, a cluster, minutes."""
HOME = "/home/me"
"""Folder that pages show in place of the one in which a session runs."""
CTRL_C = "^C"
"""Line of an output at which Ctrl-C is pressed, as a terminal shows it."""
_MARK = re.compile(r"<!-- (needs|file|append): (\S+) -->")
_FENCE = re.compile(r"(`{3,})(\S*)")
_SCRIPT = """{command}
status=$?
env -0 >{variables}
exit $status
"""
_PLAIN = re.compile(r"""clipship( [\w./:=,+-]+| [\w.=]*'[^']*'| "[\w ]*")*""")
"""A command of ours alone, in which the shell expands nothing."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """Line of its first content."""
    language: str
    mark: tuple[str, str]
    """Kind and value of the comment above; both empty if there is none."""
    lines: tuple[str, ...]

    @property
    def needs(self) -> str:
        """Name of what a laptop lacks for this block; empty if it lacks nothing."""
        return self.mark[1] if self.mark[0] == "needs" else ""

    @property
    def file(self) -> str:
        """File of the session that this block is written or appended to; empty if none."""
        return self.mark[1] if self.mark[0] in ("file", "append") else ""


@dataclass(frozen=True)
class Command:
    """A command of a console block."""

    block: Block
    line: int
    text: str
    shown: tuple[str, ...]
    """Its output on the page; empty if the page shows none."""

    @property
    def place(self) -> str:
        return f"{self.block.page.relative_to(ROOT)}:{self.line}: $ {self.text}"


def blocks(page: Path) -> Iterator[Block]:
    """Yields the fenced blocks of a page, from top to bottom."""
    lines = page.read_text(encoding="utf-8").splitlines()
    above, at = "", 0
    while at < len(lines):
        fence = _FENCE.fullmatch(lines[at])
        if fence:
            end = lines.index(fence[1], at + 1)
            mark = _MARK.fullmatch(above)
            kind, value = mark.groups() if mark else ("", "")
            yield Block(page, at + 2, fence[2], (kind, value), tuple(lines[at + 1 : end]))
            at = end
        above = lines[at]
        at += 1


def commands(page: Path) -> Iterator[Command]:
    """Yields the commands of a page's console blocks, from top to bottom."""
    for block in blocks(page):
        yield from commands_of(block)


def commands_of(block: Block) -> Iterator[Command]:
    """Yields the commands of one block; none if it is no console block."""
    if block.language != "console":
        return
    starts = [at for at, line in enumerate(block.lines) if line.startswith("$ ")]
    if not starts or starts[0] != 0:
        raise ValueError(f"{block.page.name}:{block.line}: a console block begins with `$ COMMAND`")
    for start, end in pairwise([*starts, len(block.lines)]):
        yield _command(block, start, end)


def _command(block: Block, start: int, end: int) -> Command:
    text = [block.lines[start].removeprefix("$ ")]
    at = start + 1
    while at < end and re.match(r">( |$)", block.lines[at]):
        text.append(block.lines[at][2:])
        at += 1
    return Command(block, block.line + start, "\n".join(text), block.lines[at:end])


class Session:
    """Runs the commands of one page, one after the other, in one folder.

    The folder and the exported variables of a command are those of the next. A command of ours alone needs no
    shell, so that it may be a fork of a warm interpreter: see `tests.support.warm.client`.
    """

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.folder = folder.resolve()
        self.limit_s = limit_s
        self._exported = self.folder / ".variables"

    def save(self, block: Block) -> None:
        """Write the block's lines into its file, or append them to it."""
        with (self.folder / block.file).open("a" if block.mark[0] == "append" else "w") as file:
            file.write("\n".join(block.lines) + "\n")

    def run(self, text: str, shown: tuple[str, ...] = ()) -> tuple[int, list[str]]:
        """Returns the command's exit code and the lines of its output, stdout and stderr as they come.

        If the page shows `^C`, the command is interrupted when it has printed what is above.
        """
        variables = self._variables()
        process = subprocess.Popen(
            self._command(text),
            cwd=variables["PWD"],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        printed = ""
        if CTRL_C in shown:
            printed = self._interrupted(process, shown[: shown.index(CTRL_C)])
        try:
            printed += process.communicate(timeout=self.limit_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed += process.communicate()[0] + f"\n(killed after {self.limit_s:.0f} s)"
        return process.returncode, self._lines(printed)

    def _interrupted(self, process: "subprocess.Popen[str]", above: tuple[str, ...]) -> str:
        """Presses Ctrl-C when these lines are printed; returns the output until then, with the `^C`.

        If they never come, returns the output of a command that ends, or that says nothing for long.
        """
        assert process.stdout is not None
        output = b""
        while not matches(above, self._lines(output.decode(errors="replace"))):
            ready, _, _ = select.select([process.stdout], [], [], self.limit_s)
            part = os.read(process.stdout.fileno(), 65536) if ready else b""
            if not part:
                return output.decode(errors="replace")
            output += part
        os.killpg(process.pid, signal.SIGINT)
        return output.decode(errors="replace") + CTRL_C

    def _lines(self, printed: str) -> list[str]:
        return [line.rstrip() for line in printed.replace(str(self.folder), HOME).splitlines()]

    def _command(self, text: str) -> list[str]:
        plain = text.replace("\\\n", "")
        if _PLAIN.fullmatch(plain):
            return [sys.executable, "-m", "trainer.cli.main", *shlex.split(plain)[1:]]
        return ["bash", "-c", _SCRIPT.format(variables=shlex.quote(str(self._exported)), command=text)]

    def _variables(self) -> dict[str, str]:
        """Returns those of the last command that had a shell."""
        if self._exported.exists():
            entries = self._exported.read_text().rstrip("\0").split("\0")
            return dict(entry.split("=", 1) for entry in entries)
        return variables_of(self.folder)


def variables_of(folder: Path) -> dict[str, str]:
    """Returns the environment in which the commands of a page begin."""
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "PWD": str(folder),
        "PYTHONPATH": str(ROOT),  # a fork does not read again where the environment has it
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "XDG_STATE_HOME": str(folder / ".state"),
        "COLUMNS": "100",
        "CUDA_VISIBLE_DEVICES": "",  # pages show runs on the CPU
        "HF_HUB_OFFLINE": "1",
    }


def line_matches(shown: str, printed: str) -> bool:
    """Compares a line of a page with a printed one; `...` stands for any text."""
    return (
        re.fullmatch(".*".join(re.escape(part) for part in shown.rstrip().split("...")), printed) is not None
    )


def matches(shown: tuple[str, ...], printed: list[str]) -> bool:
    """Compares the output on a page with a printed one; a line of `...` stands for any number of lines."""
    at = position = back = 0
    star: int | None = None  # index of the last line of `...`; `back` is where its text ends at present
    while position < len(printed):
        if at < len(shown) and shown[at].strip() == "...":
            star, back = at, position
            at += 1
        elif at < len(shown) and line_matches(shown[at], printed[position]):
            at += 1
            position += 1
        elif star is not None:
            back += 1
            at, position = star + 1, back
        else:
            return False
    return all(line.strip() == "..." for line in shown[at:])


def masked(shown: tuple[str, ...], printed: list[str]) -> list[str]:
    """Returns what was printed, each line as the page has it where the page has one that matches.

    What a line of `...` stands for between two lines that are still printed is that line again.
    """
    patterns = [line for line in shown if line.strip() != "..."]
    seen = [next((line for line in patterns if line_matches(line, text)), text) for text in printed]
    for at, line in enumerate(shown):
        above, below = shown[at - 1 : at], shown[at + 1 : at + 2]
        if line.strip() == "..." and {*above, *below} <= set(seen):
            start = seen.index(above[0]) + 1 if above else 0
            stop = seen.index(below[0]) if below else len(seen)
            seen[start:stop] = ["..."] if start < stop else seen[start:stop]
    return seen
