"""Each shell command that README and docs/ show does what its page shows.

Commands that need a cluster are checked in form, by tests/lint. `pytest tests/docs --rewrite-goldens` writes
the printed output into the pages; read the diff.
"""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.pages import (
    CTRL_C,
    PAGES,
    Command,
    Session,
    blocks,
    commands,
    commands_of,
    masked,
    matches,
    variables_of,
)
from tests.support.warm.start import warm_starts

SLOW = {"", "horovod", "minutes"}
"""Needs of the blocks that `-m full` runs for real; `make test` runs only the first."""
LIMIT_S = 600.0
STARTING = "clipship: starting "
"""Begin of a line that a start prints after a second, which a fork of a warm interpreter does not take."""


def with_commands(needs: set[str]) -> list[Path]:
    return [page for page in PAGES if any(command.block.needs in needs for command in commands(page))]


def run_page(page: Path, folder: Path, needs: set[str], *, rewrite: bool) -> None:
    """Run a page's commands in their order, in one session; fails at the first that is not as shown."""
    session = Session(folder, LIMIT_S)
    printed_of: dict[Command, list[str]] = {}
    for block in blocks(page):
        if block.file:
            session.save(block)
        if block.needs in needs:
            for command in commands_of(block):
                printed = run_command(session, command)
                if command.shown and not matches(of_any_start(command.shown), [*of_any_start(printed)]):
                    if not rewrite:
                        pytest.fail(
                            f"{command.place}\nprints something else:\n{difference(command, printed)}"
                        )
                    printed_of[command] = masked(command.shown, printed)
    write_output(page, printed_of)


def of_any_start(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(line for line in lines if not line.startswith(STARTING))


def run_command(session: Session, command: Command) -> list[str]:
    code, printed = session.run(command.text, command.shown)
    assert code == (130 if CTRL_C in command.shown else 0), "\n".join(
        [command.place, f"ended with {code}:", *printed]
    )
    return printed


def difference(command: Command, printed: list[str]) -> str:
    seen = masked(command.shown, printed)
    return "\n".join(difflib.unified_diff(command.shown, seen, "the page", "printed now", lineterm="", n=1))


def write_output(page: Path, printed_of: dict[Command, list[str]]) -> None:
    if not printed_of:
        return
    lines = page.read_text(encoding="utf-8").splitlines()
    for command, printed in sorted(printed_of.items(), key=lambda item: -item[0].line):
        start = command.line - 1 + len(command.text.split("\n"))
        lines[start : start + len(command.shown)] = printed
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of each page in its turn: libraries read the name where they are imported, which is once."""
    folder = tmp_path_factory.mktemp("pages").resolve() / "me"
    with warm_starts(variables_of(folder)) as problem:
        if problem:
            print(f"each rank imports torch by itself, which takes seconds: {problem}")
        yield folder


@pytest.fixture
def folder(place: Path, tmp_path: Path) -> Iterator[Path]:
    place.mkdir()
    yield place
    place.rename(tmp_path / "me")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", with_commands({""}), ids=lambda page: page.name)
def test_commands_print_what_their_page_shows(
    page: Path, folder: Path, request: pytest.FixtureRequest
) -> None:
    run_page(page, folder, {""}, rewrite=request.config.getoption("--rewrite-goldens"))


@pytest.mark.full
@pytest.mark.horovod
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", with_commands(SLOW - {""}), ids=lambda page: page.name)
def test_commands_that_take_minutes_print_what_their_page_shows(
    page: Path, folder: Path, request: pytest.FixtureRequest
) -> None:
    run_page(page, folder, SLOW, rewrite=request.config.getoption("--rewrite-goldens"))


def test_output_matches_with_dots_for_what_varies() -> None:
    assert matches(("a ... c", "...", "z"), ["a b c", "x", "z", "y", "z"])
    assert matches(("...",), [])
    assert not matches(("a", "b"), ["a"])
    assert not matches(("a",), ["a", "b"])
    assert not matches(("a", "...", "z"), ["a", "y"])


def test_rewriting_keeps_the_dots_of_a_page() -> None:
    shown = ("a ...", "...", "z", "end")
    assert masked(shown, ["a 1", "b", "c", "z", "the end"]) == ["a ...", "...", "z", "the end"]
    assert masked(shown, ["a 1", "b", "y", "end"]) == ["a ...", "b", "y", "end"]
    assert masked(("...", "z"), ["a", "z"]) == ["...", "z"]


def test_session_keeps_folder_and_variables(tmp_path: Path) -> None:
    session = Session(tmp_path, 60.0)
    session.run("mkdir inner; cd inner; export COLOUR='light green'")
    assert session.run('echo "$COLOUR $PWD"; exit 3') == (3, ["light green /home/me/inner"])


def test_session_presses_ctrl_c_where_a_page_shows_it(tmp_path: Path) -> None:
    session = Session(tmp_path, 60.0)
    waits = "trap 'echo; echo ended; exit 130' INT; echo going on; echo there; sleep 60"
    assert session.run(waits, ("...", "there", "^C", "ended")) == (130, ["going on", "there", "^C", "ended"])
    assert session.run("echo another", ("there", "^C", "ended")) == (0, ["another"])


def test_a_page_that_shows_something_else_fails_with_page_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.pages.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```console\n$ echo two\none\n```\n")
    (tmp_path / "session").mkdir()
    with pytest.raises(pytest.fail.Exception, match=r"page\.md:4: \$ echo two\n(.|\n)*-one\n\+two"):
        run_page(page, tmp_path / "session", {""}, rewrite=False)
