"""Each shell command that README and docs/ show does what its page shows.

Commands that need a cluster are checked in form. `pytest tests/docs --rewrite-goldens` writes the printed
output into the pages; read the diff.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.page_rules import problems, unknown_keys
from tests.support.pages import CTRL_C, ROOT, Command, Session, blocks, commands, commands_of, masked, matches
from trainer.errors import EXIT_INTERRUPTED

PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LANGUAGES = {"console", "csv", "json", "python", "text", "toml"}
NEEDS = {"checkout", "docker", "horovod", "hosts", "kubernetes", "minutes", "slurm"}
"""Needs that a block may name: a checkout, a daemon, Horovod, other machines, a cluster, minutes."""
SLOW = {"", "horovod", "minutes"}
"""Needs of the blocks that `-m full` runs for real; `make test` runs only the first."""
LIMIT_S = 600.0
SITE_PAGES = [page for page in PAGES if page.parent != ROOT]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


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
                if command.shown and not matches(command.shown, printed):
                    if not rewrite:
                        pytest.fail(
                            f"{command.place}\nprints something else:\n{difference(command, printed)}"
                        )
                    printed_of[command] = masked(command.shown, printed)
    write_output(page, printed_of)


def run_command(session: Session, command: Command) -> list[str]:
    code, printed = session.run(command.text, command.shown)
    assert code == (EXIT_INTERRUPTED if CTRL_C in command.shown else 0), "\n".join(
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


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", with_commands({""}), ids=lambda page: page.name)
def test_commands_print_what_their_page_shows(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run_page(page, tmp_path, {""}, rewrite=request.config.getoption("--rewrite-goldens"))


@pytest.mark.full
@pytest.mark.horovod
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", with_commands(SLOW - {""}), ids=lambda page: page.name)
def test_commands_that_take_minutes_print_what_their_page_shows(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run_page(page, tmp_path, SLOW, rewrite=request.config.getoption("--rewrite-goldens"))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_that_need_a_cluster_have_known_programs_and_options(page: Path) -> None:
    wrong = [
        f"{command.place}: {problem}"
        for command in commands(page)
        if command.block.needs
        for problem in problems(command.text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["cli.md", "from-open-clip.md"])
def test_examples_on_generated_pages_have_known_options(name: str) -> None:
    examples = list(examples_of(ROOT / "docs" / name))
    wrong = [f"{line!r}: {problem}" for line in examples for problem in problems(line)]
    assert not wrong, "\n".join(wrong)
    assert any(line.startswith("clipship check job.toml") for line in examples)


def examples_of(page: Path) -> Iterator[str]:
    """Yields the commands in a generated page's text blocks, without the words that some have behind them."""
    for block in blocks(page):
        for line in "\n".join(block.lines).replace("\\\n", " ").splitlines():
            if re.match(r" *(clipship|srun|torchrun) (?!.*\[OPTIONS\])", line):
                yield re.split(r"(?<=\S)\s{3,}(?!-)", line.strip())[0]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_each_block_says_what_it_holds(page: Path) -> None:
    wrong = [
        f"{page.name}:{block.line}: {block.language or 'no language'} {block.needs}"
        for block in blocks(page)
        if block.language not in LANGUAGES or block.needs not in NEEDS | {""}
    ]
    assert not wrong, f"known are {sorted(LANGUAGES)}, needs {sorted(NEEDS)}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_no_command_hides_in_another_block_or_behind_a_misspelt_mark(page: Path) -> None:
    lines = [
        line
        for block in blocks(page)
        if block.language != "console"
        for line in block.lines
        if line.startswith("$ ")
    ]
    marks = [line for line in page.read_text().splitlines() if re.match(r"<!--\s*(needs|file|append)", line)]
    assert lines == []
    assert len(marks) == sum(1 for block in blocks(page) if any(block.mark))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_tables_of_a_job_have_known_keys(page: Path) -> None:
    wrong = [
        f"{page.name}:{block.line}: {key}"
        for block in blocks(page)
        if block.language == "toml"
        for key in unknown_keys(tomllib.loads("\n".join(block.lines)))
    ]
    assert not wrong


@pytest.mark.parametrize("page", PAGES[:2], ids=NAMES[:2])
def test_links_of_readme_lead_to_files_and_headings(page: Path) -> None:
    wrong = []
    for link in LINK.findall(page.read_text()):
        if not link.startswith("https://"):
            name, _, heading = link.partition("#")
            target = page.parent / name if name else page
            if not target.exists() or (heading and heading not in slugs(target)):
                wrong.append(link)
    assert not wrong


def slugs(page: Path) -> set[str]:
    """Anchors that a forge makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_leads_to_every_page_of_the_menu() -> None:
    menu = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    links = {Path(link).name for link in LINK.findall((ROOT / "README.md").read_text())}
    assert menu - {"index.md"} <= links
    assert menu == {page.name for page in SITE_PAGES}


def test_pages_stay_short_and_readme_is_wrapped() -> None:
    for page in PAGES[:2]:
        lines = page.read_text().splitlines()
        assert len(lines) <= 150, f"{page.name} is for a first look: move what is longer to docs/"
        assert [line for line in lines if len(line) > 100 and not line.startswith("|")] == []


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("frobnicate --all", "no rule knows the program 'frobnicate'"),
        ("clipship submit job.toml --to slurmm", "'slurmm' is not one of"),
        ("clipship submit job.toml --too slurm", "No such option"),
        ("clipship render slurm job.toml | kubectl aply -f -", "kubectl: no rule knows 'aply'"),
        ("clipship run job.toml --set optim.lrr=1", "no key optim.lrr"),
        ("make tset", "no target tset"),
        ("A=b mpirun -n 2 -x A python -m trainer.trian job.toml", "no module trainer.trian"),
    ],
)
def test_commands_with_a_slip_have_a_problem(text: str, words: str) -> None:
    assert words in "\n".join(problems(text))
