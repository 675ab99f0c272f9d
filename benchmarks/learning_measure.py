"""Finds the held-out pictures by their names: `python -m benchmarks.learning_measure MODEL ROWS WEIGHTS...`.

Prints a JSON object for each weights file: by language, the place at which each name finds its own picture
among all pictures, from 0. open_clip loads the weights of both sides and makes the features.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import open_clip
import torch
from PIL import Image
from torch import Tensor

from benchmarks.learning_data import LANGUAGES
from trainer.evaluate.ranking import ROWS, Pairs, ahead, exact
from trainer.model.weight_names import take_off_prefixes

_BATCH = 256


def main(config: str, rows: str, weights: Sequence[str]) -> None:
    """Prints the places that each of the weights give."""
    take_off_prefixes()  # and add adapters of LoRA to their weights
    open_clip.add_model_config(config)
    name = Path(config).stem
    model, _, transform = open_clip.create_model_and_transforms(name)
    tokenizer = open_clip.get_tokenizer(name)
    held_out = [json.loads(line) for line in Path(rows).read_text(encoding="utf-8").splitlines()]
    images = torch.stack([transform(Image.open(row[0])) for row in held_out])
    names = {language: [row[number] for row in held_out] for number, language in enumerate(LANGUAGES, 1)}
    model.eval()
    for path in weights:
        trained = open_clip.factory.load_state_dict(path)
        trained.pop("logit_bias", None)  # of siglip; it moves all logits alike
        model.load_state_dict(trained)
        with torch.inference_mode():
            images_ND = torch.cat([model.encode_image(part) for part in images.split(_BATCH)])
            texts = {
                language: torch.cat([model.encode_text(part) for part in tokenizer(words).split(_BATCH)])
                for language, words in names.items()
            }
        found = {language: places(texts_ND, images_ND).tolist() for language, texts_ND in texts.items()}
        print(json.dumps(found), flush=True)


def places(texts_ND: Tensor, images_ND: Tensor) -> Tensor:
    """Returns int64 [N]: the pictures that are nearer to each text than the picture of its number."""
    pairs = Pairs(exact(images_ND), exact(texts_ND), torch.arange(len(texts_ND)))
    *_, (_, ahead_T) = ahead(pairs, range(0, len(images_ND), ROWS))
    return ahead_T


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
