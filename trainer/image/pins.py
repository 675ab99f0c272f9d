"""Python packages that a stack pins, from the lock files in docker/. Reads only those; uses no network."""

import re

from trainer.config.stack_table import MACHINES, StackRow
from trainer.sysinfo.template_folder import FOLDER

_PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)


def pins(row: StackRow | None) -> dict[str, str]:
    """Returns pinned versions by package name, as PEP 503 writes it.

    `row` None means that torch and its packages are the base's.
    """
    files = ["requirements.txt", *([f"torch/{row.torch}.txt"] if row else [])]
    texts = [(FOLDER / "docker" / name).read_text(encoding="utf-8") for name in files]
    return {normal(name): version for text in texts for name, version in _PIN.findall(text)}


def normal(name: str) -> str:
    """Returns the normalized name of a Python package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def of_linux(platform: str) -> dict[str, str]:
    """Returns what the markers of requirements ask about the system of an image, without its Python."""
    machine = {"platform_machine": MACHINES[platform], "platform_system": "Linux", "sys_platform": "linux"}
    return {**machine, "os_name": "posix", "implementation_name": "cpython"}
