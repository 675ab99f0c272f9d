"""Writes the table of all models of open_clip, at the end of docs/models.md.

`python -m tools.models_page [NAME ...]` (`make models-table`) builds each model that the imported
open_clip has, or those named, in its full size, trains it for two steps, and fails if one that is said to
train does not. The other rows stay as they stand on the page: those of release 4 are made with its checkout
first on the path.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.trial import trial
from trainer.config import Model
from trainer.model.catalog import MODELS_OF_4, config_file, known_models
from trainer.model.config_keys import OTHER_PARTS
from trainer.model.packages import TEXT_PACKAGES, Need, needed

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
_STEPS = 2
_TRAINS = "trains"
_ROW = re.compile(r"\| (?!model |-).*\|$")


def row(name: str, steps: int = _STEPS) -> str:
    """Returns the model's line of the table, after training it; what is raised says why it does not train."""
    need, config = needed(Model(name=name)), _config(name)
    begin = f"| {name} | {'4' if name in MODELS_OF_4 else '3.3'} |"
    if part := next((part for part in OTHER_PARTS if part in config), None):
        return f"{begin} | | | | refused: it is {OTHER_PARTS[part]} |"
    done = trial(name, steps)
    sizes = f"{done.image_parameters / 1e6:.1f} + {done.other_parameters / 1e6:.1f}"
    use = _use(need, config)
    return f"{begin} {_image(config)} | {_text(config)} | {sizes} | {_needs(need)} | {use} |"


def rows_of(page: str) -> dict[str, str]:
    """Returns the lines of a page's table by the names of their models."""
    lines = [line for line in page.splitlines() if _ROW.match(line)]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def page(there: str, rows: Mapping[str, str]) -> str:
    """Returns the page that is there with these rows, in the order of their names."""
    above = [line for line in there.splitlines() if not _ROW.match(line)]
    return "".join(f"{line}\n" for line in (*above, *(rows[name] for name in sorted(rows))))


def main(names: Sequence[str] = ()) -> int:
    """Writes the table; returns 1, and names the models, if some that are said to train do not."""
    names, there = names or known_models(), PAGE.read_text(encoding="utf-8")
    rows, failed = rows_of(there), []
    for number, name in enumerate(names, 1):
        try:
            rows[name] = row(name)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
        print(f"{number} of {len(names)} {name}", file=sys.stderr)
    for line in failed:
        print(line, file=sys.stderr)
    if failed:
        return 1
    PAGE.write_text(page(there, rows), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)
    return 0


def _config(name: str) -> Mapping[str, Any]:
    config: Mapping[str, Any] = json.loads(config_file(name).read_text(encoding="utf-8"))
    return config


def _image(config: Mapping[str, Any]) -> str:
    vision = config["vision_cfg"]
    if name := vision.get("timm_model_name"):
        return f"timm {name}"
    return "ResNet" if isinstance(vision.get("layers"), list) else "ViT"


def _text(config: Mapping[str, Any]) -> str:
    text = config["text_cfg"]
    own = "modern transformer" if text.get("text_arch") == "modern" else "transformer"
    return str(text.get("hf_model_name", own))


def _needs(need: Need) -> str:
    return ", ".join(f"`{name}`" for name in (("text",) if need.packages == TEXT_PACKAGES else need.packages))


def _use(need: Need, config: Mapping[str, Any]) -> str:
    if "naflexvit" in str(config["vision_cfg"].get("timm_model_name")):
        return f"{_TRAINS}, with images of any shape"
    return f'{_TRAINS}: `optim.loss = "coca"`' if need.captions else _TRAINS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
