"""Id of a run at a service, which all starts of the run share."""

import secrets
from pathlib import Path

from trainer.safe_io.atomic import write_whole
from trainer.safe_io.plain import read_plain


def lasting_id(path: Path) -> str:
    """Returns the id in the file; without a file, makes a new id and writes it there."""
    if not path.exists():
        write_whole(path, secrets.token_hex(8) + "\n")
    return read_plain(path).strip()
