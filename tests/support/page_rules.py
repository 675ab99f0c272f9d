"""Checks commands of pages without running them, by one rule for each program.

A rule knows the program's subcommands and options. Such checks are for what a laptop lacks: a cluster,
Docker, GPUs, hours. A program without a rule is a problem of its own.
"""

import importlib.util
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import click

from tests.support.pages import ROOT

Words = Sequence[str]
_ENDS = frozenset({"|", "||", "&&", ";", "&"})
_SUBCOMMANDS = {
    "apptainer": {"build", "exec"},
    "cosign": {"generate-key-pair", "sign", "attest", "verify", "verify-attestation"},
    "docker": {"run", "images", "pull", "save"},
    "enroot": {"import"},
    "git": {"clone"},
    "kubectl": {"apply", "describe", "get", "delete"},
    "syft": {"scan"},
}
_HERE = {"cd", "ls", "cat", "sbatch", "squeue", "scancel", "."}
"""Programs whose words are files and ids."""
_STARTERS = {
    "srun": ({"-n": 1, "--mpi": 0, "--nodes": 0, "--ntasks": 0}, "program"),
    "mpirun": ({"-n": 1, "-x": 1, "--allow-run-as-root": 0}, "program"),
    "horovodrun": ({"--gloo": 0, "-np": 1}, "program"),
    "torchrun": ({"--standalone": 0, "--nproc-per-node": 1, "--no-python": 0, "-m": 0}, "module"),
}
"""Options of each launcher that pages use, with the number of their words, and what comes after them."""


def problems(text: str) -> list[str]:
    """Returns what is wrong with a shell command, one sentence each."""
    return [problem for words in simple_commands(text) for problem in _problems(words)]


def simple_commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each command of a shell line, without redirections and assignments before it."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    skip = False
    for token in [*lexer, ";"]:
        if token in _ENDS:
            if words:
                yield words
            words, skip = [], False
        elif token in (">", ">>", "<", "2>"):
            skip = True
        elif skip:
            skip = False
        elif words or not re.match(r"[A-Z_]+=", token):
            words.append(token)


def _problems(words: Words) -> list[str]:
    program, rest = words[0], words[1:]
    if program in _HERE:
        return []
    if program in _SUBCOMMANDS:
        known = _SUBCOMMANDS[program]
        return [] if rest and rest[0] in known else [f"{program}: no rule knows {' '.join(rest[:1])!r}"]
    rules: dict[str, Callable[[Words], list[str]]] = {
        "clipship": _clipship,
        "make": _make,
        "python": _python,
        ".venv/bin/python": _python,
    }
    if program in _STARTERS:
        return _starter(program, rest)
    return rules[program](rest) if program in rules else [f"no rule knows the program {program!r}"]


def _clipship(words: Words) -> list[str]:
    from trainer.cli.main import cli

    command: click.Command = cli
    context = click.Context(command, info_name="clipship")
    rest = list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        inner = command.get_command(context, rest[0])
        if inner is None:
            return [f"clipship has no command {rest[0]!r}"]
        command, context = inner, click.Context(inner, parent=context, info_name=rest[0])
        rest = rest[1:]
    return _options(command, context, rest) + _keys(words)


def _options(command: click.Command, context: click.Context, words: list[str]) -> list[str]:
    """Returns the problems that click finds in the words; files need not be there."""
    try:
        values, _, _ = command.make_parser(context).parse_args(list(words))
        for parameter in command.get_params(context):
            given = values.get(parameter.name or "")
            if parameter.required and given in (None, ()):
                return [f"{context.command_path} needs {parameter.human_readable_name}"]
            if isinstance(parameter.type, click.Choice) and isinstance(given, str):
                parameter.type.convert(given, parameter, context)
    except click.UsageError as problem:
        return [problem.format_message()]
    return []


def _keys(words: Words) -> list[str]:
    """Keys that `--set` names and the job file does not know."""
    named = [after.split("=")[0] for word, after in pairwise(words) if word == "--set"]
    return [f"--set: the job file has no key {key}" for key in named if not known_key(key.split("."))]


@cache
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((ROOT / "docs" / "job-schema.json").read_text())
    return schema


def known_key(path: Sequence[str]) -> bool:
    """True if the job file has the key, or a table that takes keys of any name."""
    place = _schema()
    for name in path:
        inside = place.get("properties", {})
        if name not in inside:
            return bool(place.get("patternProperties") or place.get("additionalProperties"))
        place = inside[name]
    return True


def unknown_keys(table: dict[str, Any], above: tuple[str, ...] = ()) -> list[str]:
    """Returns the keys of a job file, or of a part of one, that the job file does not know."""
    found = []
    for name, value in table.items():
        path = (*above, name)
        if not known_key(path):
            found.append(".".join(path))
        elif isinstance(value, dict):
            found += unknown_keys(value, path)
    return found


@cache
def _makefile() -> tuple[frozenset[str], frozenset[str]]:
    """Targets and variables of the Makefile, those of benchmarks too."""
    database = subprocess.run(["make", "-pnq", "help"], cwd=ROOT, capture_output=True, text=True, check=False)
    targets = re.search(r"^\.PHONY: (.*)$", database.stdout, re.MULTILINE)
    assert targets
    variables = re.findall(r"^([A-Z_]+) [?:]=", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return frozenset(targets[1].split()), frozenset(variables)


def _make(words: Words) -> list[str]:
    targets, variables = _makefile()
    wrong = []
    for word in words:
        name, is_variable, _ = word.partition("=")
        if is_variable and name not in variables:
            wrong.append(f"the Makefile has no variable {name}")
        if not is_variable and name not in targets:
            wrong.append(f"the Makefile has no target {name}")
    return wrong


def _python(words: Words) -> list[str]:
    if len(words) < 2 or words[0] != "-m":
        return ["python: only `python -m MODULE` has a rule"]
    return _module(words[1:])


def _module(words: Words) -> list[str]:
    missing = importlib.util.find_spec(words[0]) is None
    return ([f"there is no module {words[0]}"] if missing else []) + _keys(words)


def _starter(program: str, words: Words) -> list[str]:
    options, behind = _STARTERS[program]
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option, has_value, _ = rest.pop(0).partition("=")
        if option not in options:
            return [f"{program}: no rule knows {option}"]
        if option == "--no-python":
            behind = "program"
        if not has_value:
            rest = rest[options[option] :]
    if not rest:
        return [f"{program} starts nothing"]
    return _problems(rest) if behind == "program" else _module(rest)
