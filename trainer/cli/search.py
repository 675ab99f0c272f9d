"""The command `clipship search`. Its input is checked before anything imports torch."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli import suggested
from trainer.cli.options import Command, count_option, set_of, weights_model_option
from trainer.errors import EXIT_DONE, EXIT_INTERRUPTED, InputError
from trainer.run.checkpoints import WEIGHTS
from trainer.text.live import progress, waiting
from trainer.text.terminal import one_line, say
from trainer.text.wording import many

if TYPE_CHECKING:
    from trainer.config import Job
    from trainer.search.index import Index, Picture
    from trainer.search.server import Server

_NAMED = 20
"""Pictures that cannot be used and are named; more are counted."""


@click.command(cls=Command)
@click.argument("checkpoint", metavar="RUN", shell_complete=suggested.runs)
@click.option(
    "--images",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Folder of the pictures, also of those in the folders below it.",
)
@click.option(
    "--features",
    metavar="FOLDER",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of features that `clipship embed` wrote with the same model, in place of --images.",
)
@click.option(
    "--once",
    metavar="TEXT",
    help="Print the nearest files, each behind its similarity, instead of serving a page.",
)
@count_option("--top", "Number of files that --once prints.", default=10)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    metavar="N",
    help="Port of the page; without it, a free one.",
)
@weights_model_option
@set_of("of the search's job, e.g. eval.batch_size=256.")
def command(
    checkpoint: str,
    images: Path | None,
    features: Path | None,
    once: str | None,
    top: int,
    port: int,
    model: str | None,
    overrides: tuple[str, ...],
) -> int:
    """Find the pictures in FOLDER that are nearest to a text, on a page that this machine serves to itself.

    RUN is a run (folder, job file or name in ./runs: its newest checkpoint), a checkpoint folder, a weights
    file (of Clipship, open_clip or open_clip_train), or MODEL:TAG of open_clip. The features of the pictures
    are kept in ~/.cache/clipship/search, so that a later start is fast; new and changed pictures are added.
    With --features, the pictures of shards are found by features that are there, and read to be shown. The
    page's address goes to stdout. It has a random token, without which nobody can open the page. Ctrl-C
    ends it.

    Examples:
      clipship search runs/digits --images pictures/
      clipship search digits --images pictures/ --once 'a handwritten seven' --top 5
      clipship search ViT-B-32:laion2b_s34b_b79k --images ~/Pictures --port 8080
      clipship search digits --features shards/features --once 'a handwritten seven'
    """
    from trainer.plan.trained import search_job
    from trainer.search.index import find_pictures

    if once is not None and not once.strip():
        raise InputError("--once: the text is empty: say what the picture shows")
    if (images is None) == (features is None):
        raise InputError("give either --images, a folder of pictures, or --features, one that `embed` wrote")
    job = search_job(checkpoint, model, overrides)
    left_out = _LeftOut()
    pictures = find_pictures(images, left_out) if images is not None else []
    try:
        with nullcontext() if once is not None else _server(port) as server:
            if images is not None:
                index = _index(job, images, pictures, left_out)
            else:
                index = _index_of_features(job, Path(str(features)))
            left_out.count()
            if once is not None:
                for match in index.nearest(once, top):
                    click.echo(f"{match.similarity:.3f}  {one_line(index.folder.place(match.name))}")
            if server is not None:
                _serve(server, index, _about(job))
    except KeyboardInterrupt:
        click.echo("\nclipship: Ctrl-C: the search has ended", err=True)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def _server(port: int) -> "Server":
    from trainer.search.server import Server

    return Server(port)


def _index(job: "Job", images: Path, pictures: "Sequence[Picture]", left_out: "_LeftOut") -> "Index":
    """Loads the model, and lets the pictures pass it whose features are not kept."""
    _say_loading(job, f"{many(len(pictures), 'picture')} in {one_line(str(images))}")
    with progress("loading the model", "embedded", "picture") as done:
        from trainer.data.pictures import Decoding
        from trainer.search.index import PictureFolder, cache_file, open_index
        from trainer.search.model import SearchModel

        folder = PictureFolder(images, job.data.max_member_bytes, Decoding.by(job.data))
        return open_index(SearchModel(job), folder, pictures, cache_file(job, images), done, left_out)


def _index_of_features(job: "Job", folder: Path) -> "Index":
    _say_loading(job, f"features in {one_line(str(folder))}")
    with waiting("loading the model"):
        from trainer.search.features import open_features
        from trainer.search.model import SearchModel

        return open_features(SearchModel(job), folder, job)


def _say_loading(job: "Job", what: str) -> None:
    say(f"{what}; loading {_about(job)}")
    if job.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def _serve(server: "Server", index: "Index", about: str) -> None:
    server.index, server.about = index, about
    say("open this address in a browser on this machine; Ctrl-C ends the search")
    click.echo(server.url)
    server.serve_forever()


def _about(job: "Job") -> str:
    """Returns how people call the model: its name, and its tag or the end of its weights' path."""
    name = Path(job.model.name).stem if job.model.name.endswith(".json") else job.model.name
    weights = Path(job.model.pretrained or "")
    if job.model.pretrained and weights.is_file():
        run = weights.parent.parent.parent.name if weights.name == WEIGHTS else ""
        return f"{name} from {'/'.join(filter(None, (run, weights.parent.name, weights.name)))}"
    return f"{name}:{job.model.pretrained}" if job.model.pretrained else name


class _LeftOut:
    """Names the first pictures that cannot be used, and counts the others."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, sentence: str) -> None:
        self._number += 1
        if self._number <= _NAMED:
            say(f"left out: {sentence}")

    def count(self) -> None:
        """Says how many were not named."""
        if self._number > _NAMED:
            say(f"left out: {self._number - _NAMED:,} more")
