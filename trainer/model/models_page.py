"""Writes docs/models.md, the table of all models of open_clip.

`python -m trainer.model.models_page [NAME ...]` (`make models-table`) builds each model that the imported
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

from trainer.config import Model
from trainer.model.catalog import config_file, known_models
from trainer.model.config_keys import OTHER_PARTS
from trainer.model.models_of_4 import MODELS_OF_4
from trainer.model.packages import TEXT_PACKAGES, Need, needed
from trainer.model.trial import trial

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_STEPS = 2
_TRAINS = "trains"
_ROW = re.compile(r"\| (?!model |-).*\|$")

_INTRO = """# Models

<!-- Written by `make models-table` from the configs of open_clip; changes here are overwritten. -->

open_clip 3.3 has configs of {old} models, and all of them train here. Its main branch, which becomes
release 4, has {new} more: {trained} train here, and the rows of the others say why they do not. A
row is what `clipship check` knows of a model before it starts: what it needs besides Clipship's own
packages, and what Clipship does with it. `text` is an extra, `pip install 'clipship[text]'`; an
image that is built from a job has it if the job's model needs it. Parameters are in millions, of
the image tower and of all else. `make models-table` builds each model in its full size on torch's
device `meta`, trains it for two steps, and writes this page; rows of models that the installed
open_clip lacks stay. `make models-table OPEN_CLIP=../open_clip` makes those of a checkout, and
`MODELS="RN50 ViT-B-32"` some alone.

NaFlex models (`naflexvit`) train with [images of any shape](#images-of-any-shape). The vocabulary
of tiktoken's tokenizers is fetched from the internet where it is first used, and by `clipship
fetch`: let `TIKTOKEN_CACHE_DIR` name a folder that all ranks see.

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
`"modelscope:OWNER/NAME"` (`model.pretrained`, `model.text`) comes from ModelScope, by its own
client (`pip install 'clipship[modelscope]'`); `@REVISION` behind a name keeps to that revision.

`clipship import` converts released weights of Chinese-CLIP, and of transformers' CLIPModel and
ChineseCLIPModel, to a file for `model.pretrained`, and prints the keys that fit them. Keep the
`config.json`, `preprocessor_config.json` and tokenizer of transformers beside the weights: they say
what no weight does (GELU or QuickGELU, heads, mean and deviation, resizing, vocabulary), and what
cannot be known is said. With `eval.templates = "set:chinese"`, zero-shot classification asks in
Chinese.

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
`check` counts them. Images of any size fill 95 to 99 % of a budget on average, since small ones are
enlarged: there is little padding to spare. `image_size`, `image_resize_mode`, `patch_dropout` and
`cuda_graphs` are refused. `export` writes the forms `open_clip` and `safetensors`; the others hold
images of one size.

Several budgets, and patches of several sizes, make a model for all of them:

```toml
[model]
name = "ViT-B-16-SigLIP2-naflex"
image_tokens = [128, 256, 576]
image_tokens_weights = [4, 2, 1]   # four of seven steps have 128 patches an image
image_patches = [16, 24]           # pixels of a patch's edge

[optim]
global_batch_size = 4096
max_image_tokens_per_gpu = 65536   # patches in one forward pass
```

Each step draws one of both from the seed and its number, for all ranks. A global batch stays the
same samples, as many in every step, and only its cut into passes follows from the draw: on 8 GPUs,
a step of 576 patches an image passes in 8 parts, one of 256 in 2, and one of 128 at once. So the
gradient is that of one process with the whole batch, and a resumed run draws what the uninterrupted
one would. For patches of another size than the tower's, its embedding is resampled as in FlexiViT
(arXiv 2212.08013); the weights keep their size. Evaluation and export take the largest budget and
the tower's own patches. `check` counts the memory of the step that takes most, and the time of
their mean. In open_clip_train (`--naflex-seq-lens`), a batch
of fewer patches has more samples instead.

## Out of here

`clipship export runs/NAME out --to open_clip` writes a folder that open_clip loads as
`local-dir:out`, `--to hf` one for transformers, `--to peft` the adapters of LoRA alone, `--to onnx`
a graph for each tower, `--to safetensors` weights alone, each with a model card. Every form is
loaded with the program that it is for and compared with the model: features of random pixels and of
captions, the pixels of odd-sized pictures, the tokens of captions with curly quotes and full-width
letters. Where they differ, the command says what differs and keeps nothing. For transformers, the
tokenizer that is written cleans captions as open_clip does; mojibake, which open_clip repairs,
stays as it is there.

A text tower or a tokenizer of Hugging Face's that came from a folder lies in the written one, whose
path the config holds, since open_clip takes no relative one. Where the folder is moved, Clipship
finds them beside the config all the same, and open_clip the tokenizer of `local-dir:`; for its text
tower, and for `model.json`, write the new path into the config.

## All models

| model | open_clip | image tower | text tower | parameters | needs | use |
|---|---|---|---|---|---|---|
"""


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


def page(rows: Mapping[str, str]) -> str:
    """Returns the whole page, with the rows in the order of their names."""
    new = [line for name, line in rows.items() if name in MODELS_OF_4]
    trained = sum(f"| {_TRAINS}" in line for line in new)
    intro = _INTRO.format(old=len(rows) - len(new), new=len(new), trained=trained)
    return intro + "".join(f"{rows[name]}\n" for name in sorted(rows))


def main(names: Sequence[str] = ()) -> int:
    """Writes the page; returns 1, and names the models, if some that are said to train do not."""
    names = names or known_models()
    rows, failed = rows_of(PAGE.read_text(encoding="utf-8")), []
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
