"""Reads the pictures of the last evaluation from the run folder. No torch."""

import base64
from pathlib import Path

from trainer.report.board import BOARD_FILE, read_rows
from trainer.safe_io.plain import read_json
from trainer.telemetry.pictures import Picture

_MOST = 8


def eval_pictures(run_folder: Path) -> list[Picture]:
    """Returns the first pictures of the retrieval board; empty if there is none, or none that can be read."""
    try:
        entries = read_json(run_folder / BOARD_FILE)
    except (OSError, ValueError):
        return []
    return [
        Picture(
            base64.b64decode(row.image), row.caption, row.place, [(text.text, text.own) for text in row.texts]
        )
        for row in read_rows(entries if isinstance(entries, list) else [])[:_MOST]
    ]
