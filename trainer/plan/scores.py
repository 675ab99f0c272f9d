"""Line of `clipship check` about how many samples the filters on `data.scores` keep. Imports no torch."""

from collections.abc import Iterator
from importlib.util import find_spec

from trainer.config import Job, is_remote
from trainer.text.wording import many


def score_rows(job: Job) -> Iterator[tuple[str, str]]:
    """Yields topic and text of the line; none for scores behind addresses, which may be far and large."""
    data = job.data
    if not data.scores or any(map(is_remote, data.scores)) or not find_spec("pyarrow"):
        return
    from trainer.data.scores import kept_of_all, scored, scores_of  # imports numpy

    if (scores := scores_of(data)) is None:
        return
    kept, of = kept_of_all(scores, data.filters)
    filters = ", ".join(each.text for _, each in scored(data.filters))
    yield "scores", f"{kept:,} of {many(of, 'sample')} with a row pass {filters}"
