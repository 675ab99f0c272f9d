"""Prints and writes the results of `clipship eval --suite`, and says what is not on disk.

Imports no torch.
"""

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config import Eval, Job
from trainer.evaluate.suite_folders import LAYOUT, explained, find_sets, unsupported_sets
from trainer.evaluate.suite_table import METRICS
from trainer.run.checkpoints import EMA_WEIGHTS, run_of_weights
from trainer.run.layout import EVALUATIONS
from trainer.safe_io.atomic import write_json
from trainer.text.masking import masked_values
from trainer.text.table import aligned
from trainer.text.terminal import say, shown
from trainer.text.wording import many

_LONGEST = 180
"""Characters of a file's name that say which sets it has; the names of more are cut off, with a checksum."""
_HEAD = ("data set", "metric", "value", "samples", "seconds")


def warn_of_missing(evaluation: Eval) -> None:
    """Print the sets of the suite that are not measured, each with the reason and where it comes from."""
    if not evaluation.suite.names:
        return
    missing = find_sets(evaluation).missing
    for line in explained(missing):
        say(f"not measured: {line}")
    if missing:
        say(LAYOUT)
    for name, why in unsupported_sets(evaluation).items():
        say(f"not supported: {name}: {why}")


def keep_suite(
    job: Job, about: Mapping[str, Any], results: Sequence[Mapping[str, Any]], *, table: bool
) -> dict[str, Any]:
    """Returns the suite's results as JSON has them; writes them into the run folder, if there is one.

    With `table`, they are printed on stderr too.
    """
    measured = [each for each in results if "value" in each]
    missing = find_sets(job.eval).missing
    summary = {
        "names": list(job.eval.suite.names),
        "sets": list(results),
        "mean": sum(each["value"] for each in measured) / len(measured) if measured else None,
        "missing": [{"name": m.row.name, "why": m.why, "source": m.row.source} for m in missing],
        "unsupported": unsupported_sets(job.eval),
    }
    if table:
        print(shown("\n".join(_table(measured, len(results) + len(missing)))), file=sys.stderr)
    if run := run_of_weights(job.model.pretrained):
        _write(*run, job, {**about, **summary})
    return summary


def _table(measured: Sequence[Mapping[str, Any]], total: int) -> Iterator[str]:
    """Yields the lines of the table, with the mean of the values last."""
    if not measured:
        return
    rows = [
        (
            each["name"],
            METRICS[each["metric"]].title,
            f"{each['value']:.2%}",
            f"{each['samples']:,}",
            f"{each['seconds']:.1f}",
        )
        for each in measured
    ]
    mean = sum(each["value"] for each in measured) / len(measured)
    yield from aligned(
        [_HEAD, *rows, (f"mean of {len(measured)} of {many(total, 'set')}", "", f"{mean:.2%}", "", "")]
    )


def _write(folder: Path, step: int, job: Job, content: Mapping[str, Any]) -> None:
    average = "-ema" if Path(job.model.pretrained or "").name == EMA_WEIGHTS else ""
    names = "+".join(re.sub("[/:]", "-", name) for name in job.eval.suite.names)
    if len(names) > _LONGEST:
        names = f"{names[:_LONGEST]}-{hashlib.sha256(names.encode()).hexdigest()[:12]}"
    path = folder / EVALUATIONS / f"{names}-step-{step:08d}{average}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, masked_values({**content, "step": step, "ema": bool(average)}))
    except OSError as error:
        say(f"{path}: the results are NOT WRITTEN: {error.strerror}")
