"""The written reference is that of the code: job file, JSON Schema, command line."""

from tools.reference import UNITS, description, files
from trainer.config import Job
from trainer.config.keys import walk

KEYS = [".".join(key) for key, _ in walk(Job)]


def test_the_committed_reference_is_the_codes() -> None:
    stale = [
        path.name
        for path, text in files().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run `make reference` and commit what it writes"


def test_every_key_has_a_description() -> None:
    missing = [key for key in KEYS if not description(tuple(key.split(".")))]
    assert not missing, "write a docstring below each of these keys in trainer/config/"


def test_every_ending_that_has_a_unit_is_that_of_a_key() -> None:
    assert [ending for ending in UNITS if not any(key.endswith(ending) for key in KEYS)] == []
