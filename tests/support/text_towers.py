"""Small random text towers of transformers, made here: no hub is reached."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

WORDS = (
    "a",
    "digit",
    "zero",
    "one",
    "two",
    "three",
    "写",
    "的",
    "数",
    "字",
    "零",
    "一",
    "二",
    "三",
    "图",
    "片",
)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
CASES: dict[str, dict[str, Any]] = {
    "bert": {**SIZES, "pad_token_id": 0},
    "roberta": {**SIZES, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "xlm-roberta": {**SIZES, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 40},
    "m2m_100": {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 40,
        "pad_token_id": 1,
    },
    "modernbert": {
        **SIZES,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "cls_token_id": 0,
        "sep_token_id": 2,
        "embedding_dropout": 0.1,
        "global_attn_every_n_layers": 2,
        "local_attention": 8,
    },
    "mt5": {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2, "pad_token_id": 1},
}
"""Settings of a small model of each kind."""


def make_tower(folder: Path, kind: str = "bert", *, weights: bool = True, **changes: Any) -> Path:
    """Writes config, tokenizer and random weights of a small model; returns the folder."""
    import transformers

    library: Any = transformers
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _tokenizer(folder, kind)
    config = library.AutoConfig.for_model(kind, **{"vocab_size": vocabulary, **CASES[kind], **changes})
    if weights:
        torch.manual_seed(0)
        library.AutoModel.from_config(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


def _tokenizer(folder: Path, kind: str) -> int:
    return _word_pieces(folder) if kind in ("bert", "distilbert") else _sentence_pieces(folder)


def _word_pieces(folder: Path) -> int:
    words: Sequence[str] = (*SPECIAL, *WORDS)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return len(words)


def _sentence_pieces(folder: Path) -> int:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    pieces = [(special, 0.0) for special in ("<s>", "<pad>", "</s>", "<unk>")]
    pieces += [(f"▁{word}", -2.0) for word in WORDS]
    pieces += [(word, -3.0) for word in WORDS if len(word) == 1]
    pieces += [("▁", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    library: Any = transformers
    library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(folder)
    return len(pieces)
