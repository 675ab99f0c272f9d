"""What a stack pins of Python: the lock files of docker/. Reads them alone; no network."""

import re

from trainer.launch.image.table import Row
from trainer.launch.templates import FOLDER

_PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)


def pins(row: Row | None) -> dict[str, str]:
    """Versions by name, as PEP 503 writes it; `row` None: torch and what belongs to it are the base's."""
    files = ["requirements.txt", *([f"torch/{row.torch}.txt"] if row else [])]
    texts = [(FOLDER / "docker" / name).read_text(encoding="utf-8") for name in files]
    return {normal(name): version for text in texts for name, version in _PIN.findall(text)}


def normal(name: str) -> str:
    """The name of a Python package, whatever way it is written (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
