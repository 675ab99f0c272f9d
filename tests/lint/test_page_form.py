"""Form of the pages: links, blocks and their marks, and the commands that a laptop cannot run.

`tests/docs` runs the others.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.page_rules import problems, unknown_keys
from tests.support.pages import NEEDS, PAGES, ROOT, blocks, commands

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LANGUAGES = {"console", "csv", "json", "python", "text", "toml"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


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


@pytest.mark.parametrize("name", [".ci/run", ".github/workflows/check.yml", "CONTRIBUTING.md"])
def test_targets_that_ci_and_contributors_make_are_there(name: str) -> None:
    made = re.findall(
        r"(?:^|step \w+ |\(|`|run: )(make [a-z][a-z-]*)", (ROOT / name).read_text(), re.MULTILINE
    )
    assert made
    assert [problem for command in made for problem in problems(command)] == []


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
