"""Shows some held-out digits in the terminal with the trained model's answers."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from trainer.checkpoint.files import WEIGHTS, newest
from trainer.config import Job
from trainer.config.loader import load_job
from trainer.data.pictures import decode
from trainer.data.source import open_labelled
from trainer.evaluate.inputs import class_names, templates
from trainer.model.build import Clip, untrained
from trainer.run.layout import CHECKPOINTS, JOB_FILE

SHADES = " .:-=+*#%@"
SHOWN = 6
WIDTH = 16  # characters a picture


def main(run: Path) -> None:
    """Print some held-out digits, with the answers of the run's newest checkpoint."""
    job = load_job(run / JOB_FILE)
    clip = _loaded(job, newest(run / CHECKPOINTS))
    model: Any = clip.model.eval()
    source = open_labelled(job.eval)
    names = class_names(job.eval)
    one_of_each = {raw.label: raw for raw in map(source.read, range(len(source)))}
    chosen = [raw for _, raw in sorted(one_of_each.items(), key=lambda pair: pair[0] or 0)][-SHOWN:]
    pictures = [decode(raw) for raw in chosen]
    with torch.no_grad():
        sentences = clip.tokenizer(
            [template.format(word) for word in names for template in templates(job.eval)]
        )
        words_CD = model.encode_text(sentences, normalize=True).unflatten(0, (len(names), -1)).mean(1)
        images_BD = model.encode_image(
            torch.stack([clip.eval_transform(picture) for picture in pictures]), normalize=True
        )
        shares_BC = (
            model.logit_scale.exp() * images_BD @ torch.nn.functional.normalize(words_CD, dim=1).T
        ).softmax(1)
    answers = [f"{names[int(label)]} {share:.0%}" for share, label in zip(*shares_BC.max(1), strict=True)]
    truth = [f"({names[raw.label]})" for raw in chosen if raw.label is not None]
    print("\nheld-out images, with the model's answer and (the true class):\n")
    for rows in zip(*(_drawn(picture) for picture in pictures), strict=True):
        print("  ".join(rows))
    for row in (answers, truth):
        print("  ".join(text.center(WIDTH) for text in row))


def _loaded(job: Job, checkpoint: Path) -> Clip:
    model = job.model.model_copy(update={"pretrained": str(checkpoint / WEIGHTS)})
    return untrained(job.model_copy(update={"model": model}))


def _drawn(picture: Image.Image) -> list[str]:
    """Returns the picture as lines of characters.

    There are half as many lines as columns, because characters are high.
    """
    grey = np.asarray(picture.convert("L").resize((WIDTH, WIDTH // 2), Image.Resampling.BOX), dtype=np.int64)
    return ["".join(SHADES[shade * len(SHADES) // 256] for shade in row) for row in grey.tolist()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
