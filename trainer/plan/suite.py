"""Lines of `clipship check` about the suite of data sets that a job names. Imports no torch."""

from collections.abc import Iterator

from trainer.config import Eval
from trainer.evaluate.suite_folders import find_sets
from trainer.text.terminal import shown
from trainer.text.wording import many


def suite_rows(evaluation: Eval, *, files: bool) -> Iterator[tuple[str, str]]:
    """Yields topic and text of the lines of `clipship check` about the suite."""
    suite = evaluation.suite
    if not suite.names:
        return
    names = ", ".join(suite.names)
    if not files:
        yield "suite", names
        return
    suites = find_sets(evaluation)
    total = len(suites.sets) + len(suites.missing)
    there = ", ".join(each.row.name for each in suites.sets)
    yield (
        "suite",
        shown(f"{names}: {len(suites.sets)} of {many(total, 'set')} on disk" + (there and f": {there}")),
    )
    if absent := ", ".join(each.row.name for each in suites.missing if not each.there):
        yield "", shown(f"not on disk: {absent}")
    for each in suites.missing:
        if each.there:
            yield "", shown(f"not whole: {each.row.name}: {each.why}")
    yield "", "`clipship eval RUN` measures the sets on disk; the run itself does not"
