"""Reads a folder of transformers' files without running the code that it may bring.

Such a folder may be a stranger's. `auto_map` in its files names Python files; left to itself, transformers
asks on the terminal whether to run them. An attention of the form OWNER/NAME is code on a hub.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainer.errors import InputError
from trainer.internals import attention_of

SAFELY: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of each `from_pretrained` of transformers."""


@contextmanager
def runs_no_code(folder: str) -> Iterator[None]:
    """Wraps calls of transformers with `SAFELY`; raises InputError if the folder needs code of its own."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise InputError(
            f"model.text: {folder} brings code of its own (auto_map in config.json or "
            "tokenizer_config.json), which Clipship never runs: give a text tower of a kind that the "
            "installed transformers has"
        ) from None


def check_attention(config: Any, folder: str) -> None:
    """Raises InputError if a config of transformers takes its attention from a hub."""
    name = attention_of(config)
    if name is not None and "/" in str(name):
        raise InputError(
            f"model.text: the config.json in {folder} takes its attention from a hub "
            f"(attn_implementation = {str(name)[:80]!r}), which is code that Clipship never runs: remove "
            "that key"
        )
