"""Small BERT of the Chinese demo: its config and a vocabulary of the captions' characters.

The folder has no weights, which gives a tower with random ones, from the job's seed. Imports no torch.
"""

import json
from pathlib import Path

from trainer.demo.data import Words
from trainer.safe_io.atomic import write_whole

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.1,  # BERT's 0.02 is for a width of 768
}


def make_text_tower(folder: Path, words: Words) -> None:
    """Writes config.json and vocab.txt of a BERT for the captions."""
    characters = sorted(set("".join((*words.class_names, *words.templates))) - set("{}"))
    vocabulary = [*_SPECIAL, *characters]
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "vocab.txt", "".join(f"{word}\n" for word in vocabulary))
    config = {"model_type": "bert", "vocab_size": len(vocabulary), "pad_token_id": 0, **_SIZES}
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")
