"""Commands run in this process, and what `clipship check` and `clipship render` say of a job's table."""

import io
import json
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from tests.support.jobs import VIT
from trainer.cli.main import main

Table = dict[str, Any]
TINY: Table = {
    "name": "tiny",
    "data": {"format": "synthetic", "synthetic_samples": 64, "workers": 0},
    "model": {"name": VIT},
    "optim": {"global_batch_size": 16, "steps": 4, "lr": 1e-3},
    "logging": {"runs": "/scratch/runs"},
}


class Said(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


def clipship(*words: object, code: int | None = None) -> Said:
    """Runs a command, which must end with the code, if one is given."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "surrogateescape", newline="") for _ in "oe")
    with redirect_stdout(out), redirect_stderr(err):
        ended = main([str(word) for word in words])
    said = Said(ended, *(_text(stream) for stream in (out, err)))
    assert code in (None, ended), said.err
    return said


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()


def joined(base: Table, **sections: Any) -> Table:
    """The table with more keys in its sections, or other ones; a key that is None is left out."""
    table = dict(base)
    for name, given in sections.items():
        if isinstance(given, dict):
            given = {key: its for key, its in {**table.get(name, {}), **given}.items() if its is not None}
        table[name] = given
    return table


def with_file(command: Sequence[str], table: Table, *words: object) -> Said:
    """Runs a command on a job file that has this table, and leaves the file's folder out of what it says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.toml")
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
        code, *texts = clipship(*command, path, *words)
        return Said(code, *(text.replace(f"{folder}/", "") for text in texts))


def render(kind: str, table: Table, *words: object) -> Said:
    """What `clipship render` says of a job."""
    return with_file(["render", kind], table, *words)


def check(table: Table, *words: object, files: bool = False) -> dict[str, Any]:
    """What `clipship check --json` finds in a job; `files` lets it open those that the job names."""
    said = with_file(["check"], table, "--json", *([] if files else ["--no-data"]), *words)
    found: dict[str, Any] = json.loads(said.out)
    assert said.code == (0 if found["ok"] else 2)
    return found


def tiny(**sections: Any) -> dict[str, Any]:
    """What `clipship check` finds in a job of a tiny model."""
    return check(joined(TINY, **sections))


def problems(**sections: Any) -> str:
    """What `clipship check` refuses in a job of a tiny model; "" if it refuses nothing."""
    return "\n".join(tiny(**sections).get("problems", ()))
