"""Judges the tests of a room: `make mutants ROOM=supervise`.

Draws mutants of trainer/ROOM by a seed from all that it can make, and runs those tests that reach each.
Prints which mutants live, and a lean set of tests: few that reach every branch and kill all that is killed.
Works in a copy of the checkout. The last line is JSON; `--out` writes everything.
"""

import argparse
import ast
import contextlib
import gc
import itertools
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

import coverage
import pytest

SEED, NUMBER = 59, 60
ENOUGH = 5  # tests that kill a mutant; who else does, is not asked
HANGS_S = 20.0  # beyond ten times its own duration
FAILED: set[str] = set()
"""The test of this process that failed last."""

SIGNS = (
    (ast.Lt, "<="), (ast.LtE, "<"), (ast.Gt, ">="), (ast.GtE, ">"), (ast.Eq, "!="), (ast.NotEq, "=="),
    (ast.Is, "is not"), (ast.IsNot, "is"), (ast.In, "not in"), (ast.NotIn, "in"),
    (ast.Add, "-"), (ast.Sub, "+"), (ast.Mult, "/"), (ast.Div, "*"), (ast.FloorDiv, "*"), (ast.Mod, "+"),
)  # fmt: skip
Say = Callable[[str, bool, float], object]
SWAPS: dict[type[ast.AST], str] = dict(SIGNS)


class Mutant(NamedTuple):
    """One change: the bytes between two places of a file, and what stands there instead."""

    path: str
    line: int
    start: int
    end: int
    text: str
    last: int
    """Its last line; a statement of several lines is reached where any of them is."""

    def applied(self, source: bytes) -> bytes:
        """The file with the change; all other lines keep their numbers."""
        lines = b"\n" * source[self.start : self.end].count(b"\n")
        return source[: self.start] + self.text.encode() + lines + source[self.end :]


def changes(node: ast.AST) -> Iterator[str]:
    """What may stand in place of a node."""
    match node:
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in SWAPS:
            yield f"(({ast.unparse(left)}) {SWAPS[type(sign)]} ({ast.unparse(right)}))"
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in SWAPS and not _has_text(node):
            yield f"(({ast.unparse(left)}) {SWAPS[type(sign)]} ({ast.unparse(right)}))"
        case ast.BoolOp(op=sign, values=values):
            word = " or " if isinstance(sign, ast.And) else " and "
            yield "(" + word.join(f"({ast.unparse(value)})" for value in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"bool({ast.unparse(operand)})"
        case ast.IfExp(body=body, orelse=other):
            yield f"({ast.unparse(other)})"
            yield f"({ast.unparse(body)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(number) | float(number)):
            yield repr(number + 1)
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield "return None"
        case ast.AugAssign(target=target, value=value):
            yield f"{ast.unparse(target)} = {ast.unparse(value)}"
        case ast.Continue():
            yield "break"
        case ast.Raise() | ast.Expr(value=ast.Call() | ast.Await()):
            yield "pass"


def _has_text(node: ast.AST) -> bool:
    constants = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return any(not isinstance(value, int | float) for value in constants)


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of the functions of a file that still compile, but for those of messages and types."""
    source = path.read_bytes()
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    found: set[Mutant] = set()

    def place(line: int, column: int) -> int:
        return starts[line - 1] + column

    def visit(node: ast.AST, statement: int) -> None:
        if isinstance(node, ast.JoinedStr | ast.arguments | ast.AnnAssign):
            return
        if isinstance(node, ast.stmt):
            statement = node.lineno
        for text in changes(node):
            assert isinstance(node, ast.stmt | ast.expr)
            start = place(node.lineno, node.col_offset)
            end = place(node.end_lineno or 0, node.end_col_offset or 0)
            mutant = Mutant(str(path), statement, start, end, text, node.end_lineno or 0)
            with contextlib.suppress(SyntaxError):
                compile(mutant.applied(source), str(path), "exec")
                found.add(mutant)
        for child in ast.iter_child_nodes(node):
            visit(child, statement)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in node.body:
                visit(child, child.lineno)
    return sorted(found)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


def put_in(path: Path) -> None:
    """Gives the functions of a file that live in this process the code that the file has now."""
    new = {(c.co_qualname, c.co_firstlineno): c for c in _codes(compile(path.read_bytes(), path, "exec"))}
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename == str(path):
            old = function.__code__
            code = new.get((old.co_qualname, old.co_firstlineno))
            if code is not None and code.co_freevars == old.co_freevars:
                function.__code__ = code


class Reached(NamedTuple):
    """What a test does without a mutant."""

    item: pytest.Item
    seconds: float
    failed: bool
    lines: set[str]
    branches: set[str]


class Judge:
    """A plugin of pytest that collects once, and forks for each run of some of the tests."""

    def __init__(self, room: str, number: int, seed: int) -> None:
        self.room, self.number, self.seed = room, number, seed
        self.rows: list[dict[str, object]] = []
        self.tests: dict[str, Reached] = {}
        self.lean: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a test that fails."""
        if report.failed:
            FAILED.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs the tests without a mutant, then with each."""
        gc.unfreeze()  # for `put_in`; tests/conftest.py has frozen all
        self.tests = reached(session.items, Path("trainer", self.room).absolute())
        files = sorted(Path("trainer", self.room).rglob("*.py"))
        possible = [mutant for path in files for mutant in mutants_of(path)]
        drawn = sorted(random.Random(self.seed).sample(possible, min(self.number, len(possible))))
        failed = [test.item.nodeid for test in self.tests.values() if test.failed]
        print(f"{len(self.tests)} tests, {len(failed)} of them fail; {len(possible)} mutants", flush=True)
        print(*failed, sep="\n")
        kills = []
        for number, mutant in enumerate(drawn, 1):
            old = Path(mutant.path).read_bytes()[mutant.start : mutant.end].decode()
            at = f"{mutant.path}:{mutant.line}"
            lines = {f"{mutant.path}:{line}" for line in range(mutant.line, mutant.last + 1)}
            near = [test for test in self.tests.values() if lines & test.lines and not test.failed]
            killers = killers_of(mutant, sorted(near, key=lambda test: test.seconds))
            kills.append(set(killers))
            self.rows.append(
                {"at": at, "old": old, "new": mutant.text, "reached": len(near), "killed_by": killers}
            )
            told = f"{old[:50]!r} -> {mutant.text[:50]!r}"
            print(f"{number}/{len(drawn)} {at} {told}: {len(killers)} of {len(near)} kill it", flush=True)
        self.lean = sorted(lean_set(self.tests, kills))
        return True


def reached(items: list[pytest.Item], room: Path) -> dict[str, Reached]:
    """What each test does, run in one process, which ends then."""
    data = os.path.abspath("mutants.coverage")

    def run(say: Say) -> None:
        cover = coverage.Coverage(data_file=data, branch=True, source=[str(room)], config_file=False)
        for item, following in itertools.zip_longest(items, items[1:]):
            cover.start()
            cover.switch_context(item.nodeid)
            begin = time.perf_counter()
            failed = fails(item, following)
            cover.stop()
            say(item.nodeid, failed, time.perf_counter() - begin)
        cover.save()

    said = list(forked(run, itertools.repeat(600.0)))
    if len(said) < len(items):
        sys.exit(f"the tests end in the midst of {items[len(said)].nodeid}")
    found = coverage.CoverageData(data)
    found.read()
    tests = {}
    for item, (name, failed, seconds) in zip(items, said, strict=True):
        found.set_query_context(name)
        arcs = [
            (os.path.relpath(path), *arc) for path in found.measured_files() for arc in found.arcs(path) or []
        ]
        lines = {f"{path}:{abs(line)}" for path, *both in arcs for line in both}
        branches = {f"{path}:{start}:{end}" for path, start, end in arcs}
        tests[name] = Reached(item, seconds, failed, lines, branches)
    return tests


def killers_of(mutant: Mutant, tests: list[Reached]) -> list[str]:
    """The first tests that fail with a mutant, hang, or end the process."""
    path = Path(mutant.path).absolute()
    source, times = path.read_bytes(), path.stat()
    killers: list[str] = []
    path.write_bytes(mutant.applied(source))  # for the processes that tests start, too
    try:
        while tests and len(killers) < ENOUGH:
            left = [test.item for test in tests]

            def run(say: Say, left: list[pytest.Item] = left) -> None:
                put_in(path)
                failed = 0
                for item, following in itertools.zip_longest(left, left[1:]):
                    failed += (bad := fails(item, following))
                    say(item.nodeid, bad, 0.0)
                    if failed == ENOUGH:
                        break

            waits = itertools.chain((HANGS_S + 10 * test.seconds for test in tests), [HANGS_S])
            said = list(forked(run, waits))
            killers += [name for name, failed, _ in said if failed]
            if len(said) < len(left) and len(killers) < ENOUGH:
                killers.append(left[len(said)].nodeid)
            tests = tests[len(said) + 1 :]
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return killers


def fails(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Runs a test in this process."""
    FAILED.clear()
    item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
    return item.nodeid in FAILED


def forked(run: Callable[[Say], None], waits: Iterator[float]) -> Iterator[tuple[str, bool, float]]:
    """What a forked process says; it is killed when it says nothing for as long as the next wait."""
    read, write = os.pipe()
    process = os.fork()
    if not process:
        os.setpgid(0, 0)
        with open(os.devnull, "w") as silence:
            os.dup2(silence.fileno(), 1)
            os.dup2(silence.fileno(), 2)
        try:
            run(lambda *what: os.write(write, (json.dumps(what) + "\n").encode()))
        finally:
            os._exit(0)
    os.close(write)
    rest = b""
    try:
        wait = next(waits)
        while select.select([read], [], [], wait)[0] and (part := os.read(read, 65536)):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield tuple(json.loads(line))
                wait = next(waits)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(read)


def lean_set(tests: dict[str, Reached], kills: list[set[str]]) -> set[str]:
    """Functions of tests that reach and kill together what all do, the cheapest first."""
    does: dict[str, set[str]] = {}
    cost: dict[str, float] = {}
    for name, test in tests.items():
        function = name.partition("[")[0]
        killed = {f"mutant {number}" for number, killers in enumerate(kills) if name in killers}
        does.setdefault(function, set()).update(test.branches, killed)
        cost[function] = cost.get(function, 0.5) + test.seconds
    missing = set().union(*does.values())
    chosen: set[str] = set()
    while missing:
        best = max(does, key=lambda function: len(does[function] & missing) / cost[function])
        chosen.add(best)
        missing -= does[best]
    return chosen


def tests_of(room: str) -> list[str]:
    """The modules of unit tests that import more from this room than from any other."""
    found = []
    for path in sorted(Path("tests/unit").glob("test_*.py")):
        modules = [
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainer.")
            for _ in node.names
        ]
        most = Counter(str(module).split(".")[1] for module in modules).most_common(1)
        if most and most[0][0] == room.split("/")[0]:
            found.append(str(path))
    return found


def _copy_checkout() -> str:
    folder = tempfile.mkdtemp(prefix="mutants-")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    names = [name for name in listed if name and os.path.lexists(name)]
    subprocess.run(["cp", "--archive", "--parents", "--target-directory", folder, *names], check=True)
    return folder


def main() -> int:
    """Prints what it found, mutant by mutant."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("room", help="a folder of trainer/: supervise, or data/shards")
    parser.add_argument("tests", nargs="*", help="modules of tests in place of the room's own")
    parser.add_argument("--number", type=int, default=NUMBER)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, help="a file for everything that was found, in JSON")
    args = parser.parse_intermixed_args()
    judge = Judge(args.room, args.number, args.seed)
    options = ["-q", *(f"-pno:{plugin}" for plugin in ("cacheprovider", "xdist", "unraisableexception"))]
    here, copy = os.getcwd(), _copy_checkout()
    try:
        os.chdir(copy)
        os.environ.update(PYTHONPATH=copy, PYTHONDONTWRITEBYTECODE="1")
        os.environ["OMP_NUM_THREADS"] = "1"  # a fork has no threads of its parent, and would wait for them
        sys.path.insert(0, copy)
        if status := pytest.main([*options, *(args.tests or tests_of(args.room))], plugins=[judge]):
            return int(status)
    finally:
        os.chdir(here)
        shutil.rmtree(copy, ignore_errors=True)
    seconds = {name: round(test.seconds, 3) for name, test in judge.tests.items()}
    if args.out:
        found = {"mutants": judge.rows, "seconds": seconds, "lean": judge.lean}
        args.out.write_text(json.dumps(found, indent=1))
    for row in judge.rows:
        if not row["killed_by"]:
            print(f"alive: {row['at']} {row['old']!r} -> {row['new']!r}, reached by {row['reached']} tests")
    print("lean:", *judge.lean, sep="\n  ")
    counts = {"tests": len(seconds), "lean": len(judge.lean), "seconds": round(sum(seconds.values()), 1)}
    killed = sum(bool(row["killed_by"]) for row in judge.rows)
    print(json.dumps({"room": args.room, **counts, "mutants": len(judge.rows), "killed": killed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
