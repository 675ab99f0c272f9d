"""shellcheck and hadolint on rendered texts. Where one of them is not installed, a test is skipped."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HADOLINT = Path(sys.executable).with_name("hadolint")
ALLOWED = {
    "DL3002": "stages that are thrown away stay root; the image's own user is clipship",
    "DL3003": "a cd within one step needs no WORKDIR, which would be a layer",
    "DL3008": "mirrors.apt can be a dated snapshot, which pins every package of the system",
    "DL4006": "no step is decided by the first program of a pipe",
}
"""Rules of hadolint that the Dockerfile breaks, each with the reason."""


def shellcheck(script: str) -> str:
    """Returns what shellcheck has against a script; empty if nothing."""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    return _said(["shellcheck", "-"], script)


def hadolint(dockerfile: str) -> str:
    """Returns what hadolint has against a Dockerfile, beside what is allowed; empty if nothing."""
    if not HADOLINT.exists():
        pytest.skip("hadolint is not installed beside this Python")
    ignored = [word for rule in ALLOWED for word in ("--ignore", rule)]
    return _said([str(HADOLINT), "--no-color", "--failure-threshold", "warning", *ignored, "-"], dockerfile)


def _said(command: list[str], text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""
