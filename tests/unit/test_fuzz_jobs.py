"""Job files of every kind: `check`, `render` and `submit` accept each or refuse it in words.

None of them hangs or shows a traceback.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.command_line import clipship
from trainer.cli.main import main
from trainer.presets.files import preset_names, preset_text

BASE = {
    ("name",): "fuzz",
    ("data", "format"): "synthetic",
    ("data", "synthetic_samples"): 64,
    ("optim", "global_batch_size"): 16,
    ("optim", "steps"): 2,
    ("optim", "lr"): 1e-3,
}
SECRET = "s3cr3t"
LIMIT_S = 2.0
"""Limit for one command on one job file, in CPU time of this process.

Other processes cannot lengthen CPU time.
"""
HOSTILE = [
    "", " ", "'", '"', "$(false)", "`false`", "a\nb", "\x00", "\\", "#", "%j", "é" * 300, "-", "--", "../..",
    "/", "{0..9}", "[x", "pipe:", "\x1b[2J\x1b]0;x\x07\x9b", "\u202e\ufeff\u2028",
    f"pipe:curl -H 'Authorization: Bearer {SECRET}' x", f"token={SECRET}", f"x?X-Amz-Signature={SECRET}&a=b",
]  # fmt: skip
WORDS = [
    "auto", "none", "4G", "1-00:00:00", "90", "UNLIMITED", "10Gi", "500m", "debian:12", "2.6.0", "8.0",
    "RN50", "node1", "a=b,c", "~",
]  # fmt: skip
NUMBERS = [0, 1, 2, 8, -1, 4096, 10**9, 2**63 - 1, 0.0, 0.5, 1.0, -0.1, 1e-320, 1e308, math.inf, math.nan]


def leaves(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Each key of the job file, and the values that its choices or its default name."""
    for name, its in table["properties"].items():
        if "properties" in its:
            yield from leaves(its, (*path, name))
        forms = [its, *its.get("anyOf", ()), *its.get("oneOf", ())]
        named = [value for form in forms for value in form.get("enum", ()) if isinstance(value, str)]
        default = its.get("default")
        yield (*path, name), [*([default] if isinstance(default, (bool, int, float, str)) else []), *named]


LEAVES = list(leaves(json.loads(clipship("explain", "", "--json").out)))
strange = st.text(max_size=8).filter(lambda value: "://" not in value)
text = st.one_of(st.sampled_from(HOSTILE), st.sampled_from(WORDS), strange)
scalars = st.one_of(text, st.sampled_from(NUMBERS), st.integers(-3, 300), st.floats(), st.booleans())
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=4,
)


@st.composite
def changes(draw: st.DrawFn) -> dict[tuple[str, ...], Any]:
    """Few of them often leave a job that can run, many seldom."""
    found = {}
    for path, named in draw(st.lists(st.sampled_from(LEAVES), max_size=draw(st.sampled_from([2, 6])))):
        found[path] = draw(st.sampled_from(named)) if named and draw(st.integers(0, 5)) else draw(values)
    return found


def toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float() | int():
            return str(value)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{', '.join(map(toml, value))}]"
    return "{" + ", ".join(f"{toml(key)} = {toml(its)}" for key, its in value.items()) + "}"


def job_text(changed: dict[tuple[str, ...], Any]) -> str:
    return "".join(f"{'.'.join(path)} = {toml(value)}\n" for path, value in (BASE | changed).items())


PRESETS = [preset_text(name).encode() for name in preset_names()]


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """A preset with a piece cut out and another put in; or bytes of no meaning."""
    whole = draw(st.sampled_from(PRESETS))
    at, length = draw(st.integers(0, len(whole))), draw(st.integers(0, 40))
    changed = whole[:at] + draw(st.binary(max_size=6)) + whole[at + length :]
    return draw(st.just(changed) | st.binary(max_size=60))


@st.composite
def vast(draw: st.DrawFn) -> str:
    """A job with more of something than anybody wants: depth, keys, digits, letters."""
    many = draw(st.sampled_from([10, 70, 900, 5000]))
    before = draw(st.sampled_from(["", *(f"{'.'.join(path)}." for path, _ in LEAVES)]))
    after, hostile = draw(st.sampled_from(["a", '"\\u001b"'])), draw(st.sampled_from(HOSTILE))
    key = before[:-1] or "seed"
    lines = [
        f"{before}{'.'.join([after] * many)} = 1",
        f"[{'.'.join([after] * many)}]",
        f"{before}a = {'[' * many}{']' * many}",
        f"{before}a = {'{a=' * many}1{'}' * many}",
        "".join(f"{before}{after[:-1]}{n}{after[-1]} = 1\n" for n in range(many)),
        "".join(f"[[{before}a{n}]]\n" for n in range(many)),
        *(f"{key} = {value}" for value in (f"0x{'f' * many}", "9" * many)),
        *(f"{key} = {toml(value)}" for value in (hostile * many, [hostile] * many)),
        f"{before}{toml('k' * 100 * many)} = 1",
    ]
    line = draw(st.sampled_from(lines))
    return draw(st.sampled_from([line + "\n" + job_text({}), job_text({}) + line]))


TEXTS = changes().map(job_text)
FILES = st.one_of(TEXTS.map(str.encode), TEXTS.map(str.encode), vast().map(str.encode), spoiled())
SCHEDULERS = ("slurm", "kubernetes")
COMMANDS = [
    ("check",),
    *(("render", kind) for kind in ("dockerfile", "apptainer", *SCHEDULERS)),
    *(("submit", "--no-check", "--set", "logging.runs=runs", "--to", scheduler) for scheduler in SCHEDULERS),
]
"""`submit` goes as far as it can without sbatch and without a cluster."""
PHASES = set(Phase) - {Phase.explain}  # it traces each line, and what is traced is slow
ACTING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("examples", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_any_job_file_gets_an_answer_or_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], examples: int
) -> None:
    path = tmp_path / "job.toml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    checked = {0: 0, 2: 0}
    slowest = (0.0, "")
    path.write_text(job_text({}))
    for command in COMMANDS:  # what is imported once is no job file's fault
        main([*command, str(path)])
    capsys.readouterr()

    def timed(command: Sequence[str]) -> tuple[int, float]:
        begin = time.process_time()
        code = main([*command, str(path)])
        return code, time.process_time() - begin

    calm = list(HealthCheck)

    @settings(max_examples=examples, suppress_health_check=calm, database=None, phases=PHASES)
    @given(FILES)
    def try_one(content: bytes) -> None:
        nonlocal slowest
        path.write_bytes(content)
        for command in COMMANDS:
            code, took_s = timed(command)
            said = capsys.readouterr()
            assert code in ({1, *checked} if command[0] == "submit" else checked), said
            assert (said.err if code else said.out).strip(), command
            told = said.err if command[0] == "render" else said.out + said.err
            assert not ACTING.search(told), told
            assert SECRET not in told
            if took_s > LIMIT_S:  # on a busy machine, perhaps; not twice
                took_s = min(took_s, timed(command)[1])
                capsys.readouterr()
            assert took_s < LIMIT_S, (took_s, command, content[:500])
            slowest = max(slowest, (took_s, f"{command} {content[:200]!r}"))
            if command == ("check",):
                checked[code] += 1

    try_one()
    print(f"answered {checked[0]}, refused {checked[2]}; the slowest took {slowest[0]:.2f} s: {slowest[1]}")
    assert min(checked.values()) > examples / 100, "the generator makes both kinds"
