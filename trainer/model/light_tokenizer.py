"""Counts tokens by open_clip's own tokenizer where torch is not imported: for `check` and `data stats`.

Its file needs the name of torch alone, so it is run with a stand-in. Imports no torch and no open_clip.
"""

import importlib.util
import runpy
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.config import Model
from trainer.data.caption_lengths import CaptionLengths, counter_of
from trainer.errors import InputError
from trainer.model.catalog import read_config
from trainer.model.packages import needed
from trainer.model.text_config import text_config

_CLEAN = ("lower", "whitespace", "canonicalize")
"""Ways in which open_clip's tokenizer cleans a text, the default first."""
_PACKAGES = ("open_clip", "ftfy", "regex", "numpy")


def lengths_for(model: Model, captions: Iterable[str]) -> CaptionLengths | None:
    """Returns the captions' lengths for a model; None if only the ranks can count its tokens."""
    config = read_config(model.name)
    if not config or needed(model).packages or not all(map(importlib.util.find_spec, _PACKAGES)):
        return None
    try:
        text = text_config(model, config)
    except (InputError, KeyError, TypeError, ValueError):
        return None
    extra = text.get("tokenizer_kwargs")
    clean = extra.get("clean", _CLEAN[0]) if isinstance(extra, dict) else _CLEAN[0]
    counter = counter_of(_simple_tokenizer(clean)) if clean in _CLEAN else None
    return CaptionLengths(int(text["context_length"]), counter, captions) if counter else None


@cache
def _simple_tokenizer(clean: str) -> Any:
    """Returns open_clip's SimpleTokenizer; its vocabulary takes a quarter of a second to read."""
    package = importlib.util.find_spec("open_clip")
    folder = next(iter(package.submodule_search_locations or ())) if package else ""
    stand_in = ModuleType("torch")
    stand_in.__dict__.update(Tensor=object, LongTensor=object)
    is_there = "torch" in sys.modules
    sys.modules.setdefault("torch", stand_in)
    try:
        return runpy.run_path(str(Path(folder) / "tokenizer.py"))["SimpleTokenizer"](clean=clean)
    finally:
        if not is_there:
            del sys.modules["torch"]
