"""Writes docs/models.md, the table of all models of the installed open_clip.

`python -m trainer.model.models_page` (`make models-table`) builds each one in its full size, trains it
for two steps, and fails if one that is said to train does not.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainer.config import Model
from trainer.model.catalog import config_file, known_models
from trainer.model.packages import Need, needed
from trainer.model.trial import trial

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_STEPS = 2

_INTRO = """# Models

<!-- Written by `make models-table` from the configs of open_clip; changes here are overwritten. -->

open_clip {release} has configs of {count} models, and all of them train here.
A row is what `clipship check` knows of a model before it starts: what it needs besides Clipship's
own packages, and what Clipship does with it. `text` is an extra, `pip install 'clipship[text]'`; an
image that is built from a job has it if the job's model needs it. Parameters are in millions, of
the image tower and of all else. `make models-table` builds each model in its full size on torch's
device `meta`, trains it for two steps, and writes this page.

## Another text tower

`model.text` puts any text tower of Hugging Face in place of a model's own, with its tokenizer:

```toml
[model]
name = "ViT-B-16-quickgelu"
text = "hf:hfl/chinese-roberta-wwm-ext"  # or a folder with config.json, the tokenizer and weights
text_pooling = "cls"                     # "mean" and "pooler" are the others
context_length = 52
lock_text = true
lock_text_unlocked_layers = 3            # the projection and two blocks learn
```

A checkpoint keeps the tower's config and its tokenizer, so that `clipship eval`, `search` and
`export` need nothing but its folder. Ranks on a cluster ask no hub. Beforehand, on a machine that
reaches one, `clipship fetch job.toml` downloads what the job names into `model.cache_dir`, and
timm's weights for an image tower (`init = "timm"`) into `HF_HOME`; `HF_ENDPOINT` names a mirror.

`clipship import` converts released weights of Chinese-CLIP, and of transformers' CLIPModel and
ChineseCLIPModel, to a file for `model.pretrained`, and prints the keys that fit them. Keep the
`config.json`, `preprocessor_config.json` and tokenizer of transformers beside the weights: they say
what no weight does (GELU or QuickGELU, heads, mean and deviation, resizing, vocabulary), and what
cannot be known is said. With
`eval.templates = "set:chinese"`, zero-shot classification asks in Chinese. `make demo DEMO=chinese`
trains a small one from nothing.

## Images of any shape

An image tower of timm's NaFlexVit (SigLIP 2 NaFlex, arXiv 2502.14786) takes an image in its own
shape: resized, with its ratio of width to height kept, so that as many patches as possible fit
into a budget, and padded to it under a mask. `model.image_tokens` is the budget. Without it that of
the config counts (`image_seq_len`, 576 for ViT-B-16-SigLIP2-naflex); a config without one gets
images of one size, as open_clip_train gives them without `--use-naflex`.

```toml
[model]
name = "ViT-B-16-SigLIP2-naflex"   # a config of open_clip 4; `pretrained = "webli"` has its weights
image_tokens = 256                 # patches of 16 x 16 pixels: 256 x 256 of a square image
```

Sizes, crops and patches are timm's, with which open_clip_train trains: for evaluation to the last
bit, for training by the same rules from the sample's seed, with pixels that differ by rounding.
`data.crop_scale` and `[data.augment]` hold as elsewhere; `crop_ratio` is over the image's own.
Zero-shot classification, retrieval and `search` see each image in its shape, too. Every sample has
the budget's tokens, so batches, the split over ranks and the gradient are as for any model, and
`check` counts them. `image_size`, `image_resize_mode`, `patch_dropout` and `cuda_graphs` are
refused. `export` writes the forms `open_clip` and `safetensors`; the others hold images of one
size.

## Out of here

`clipship export runs/NAME out --to open_clip` writes a folder that open_clip loads as
`local-dir:out`, `--to hf` one for transformers, `--to onnx` a graph for each tower, `--to
safetensors` weights alone, each with a model card. Every form is loaded with the program that it is
for and compared with the model: features of random pixels and of captions, the pixels of odd-sized
pictures, the tokens of captions with curly quotes and full-width letters. Where they differ, the
command says what differs and keeps nothing. For transformers, the tokenizer that is written cleans
captions as open_clip does; mojibake, which open_clip repairs, stays as it is there.

## All models

| model | image tower | text tower | parameters | needs | use |
|---|---|---|---|---|---|
"""


def row(name: str, steps: int = _STEPS) -> str:
    """Returns the model's line of the table, after training it; what is raised says why it does not train."""
    need, config = needed(Model(name=name)), _config(name)
    done = trial(name, steps)
    sizes = f"{done.image_parameters / 1e6:.1f} + {done.other_parameters / 1e6:.1f}"
    needs = "`text`" if need.packages else ""
    return f"| {name} | {_image(config)} | {_text(config)} | {sizes} | {needs} | {_use(need)} |"


def page(rows: Iterable[str]) -> str:
    """Returns the whole page."""
    lines = list(rows)
    intro = _INTRO.format(
        release=version("open_clip_torch"),
        count=len(known_models()),
    )
    return intro + "".join(f"{line}\n" for line in lines)


def main() -> int:
    """Writes the page; returns 1, and names the models, if some that are said to train do not."""
    rows, failed = [], []
    for name in known_models():
        try:
            rows.append(row(name))
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
        print(f"{len(rows) + len(failed)} of {len(known_models())} {name}", file=sys.stderr)
    for line in failed:
        print(line, file=sys.stderr)
    if failed:
        return 1
    PAGE.write_text(page(rows), encoding="utf-8")
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
    return str(config["text_cfg"].get("hf_model_name", "transformer"))


def _use(need: Need) -> str:
    return 'trains: `optim.loss = "coca"`' if need.captions else "trains"


if __name__ == "__main__":
    sys.exit(main())
