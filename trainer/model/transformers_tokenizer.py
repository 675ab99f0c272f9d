"""Writes a model's tokenizer as transformers reads it, with the cleaning that captions get here.

open_clip cleans a caption with ftfy before its tokenizer sees it: curly quotes, ligatures, full-width letters
and punctuation. transformers does none of it, so that the tokenizer's own normalizer has to.
"""

import unicodedata
from functools import cache
from typing import Any

import ftfy
import open_clip
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from trainer.model.exported import Export

TOKENIZER = "tokenizer.json"
_START, _END = "<|startoftext|>", "<|endoftext|>"
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
"""Parts of a caption, each of which becomes tokens of its own: the pattern of OpenAI's tokenizer."""
_ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": " "}
"""The usual ones of HTML's; the first may have written the others twice."""
_SURROGATES, _PLANE = range(0xD800, 0xE000), 0x10000


def write_openai_tokenizer(made: Export) -> None:
    """Writes open_clip's vocabulary, also in the older form, which cannot hold the cleaning."""
    simple = open_clip.tokenizer.SimpleTokenizer()
    vocabulary = {_special(word): number for word, number in simple.encoder.items()}
    made.write("vocab.json", vocabulary)
    merges = "\n".join(" ".join(pair) for pair in simple.bpe_ranks)
    (made.folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    ends = {"bos_token": _START, "eos_token": _END, "unk_token": _END, "pad_token": _END}
    _write(made, _openai(vocabulary, list(simple.bpe_ranks)), ends)


def write_tokenizer(made: Export) -> None:
    """Writes the tokenizer of a text tower of transformers; one that is written in Python stays as it is."""
    tokenizer: Any = made.clip.tokenizer.tokenizer  # type: ignore[attr-defined]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        cleaning = Tokenizer.from_str(backend.to_str())
        own = [cleaning.normalizer] if cleaning.normalizer is not None else []
        cleaning.normalizer = normalizers.Sequence([*_cleaning(), *own])
        _write(made, cleaning, dict(tokenizer.special_tokens_map))


def _write(made: Export, tokenizer: Tokenizer, special: dict[str, str]) -> None:
    (made.folder / TOKENIZER).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    length = made.clip.tokenizer([""]).shape[1]
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": int(length)}
    inputs = {"model_input_names": ["input_ids", "attention_mask"]}
    made.write("tokenizer_config.json", {**about, **special, **inputs})


def _openai(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, end_of_word_suffix="</w>", unk_token=_END)
    )
    usual = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    tokenizer.normalizer = normalizers.Sequence([*_cleaning(), *usual])
    words = pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(
        (_END, vocabulary[_END]), (_START, vocabulary[_START]), trim_offsets=False, add_prefix_space=False
    )
    tokenizer.add_special_tokens([_START, _END])
    return tokenizer


def _cleaning() -> list[normalizers.Normalizer]:
    return [normalizers.Replace(old, new) for old, new in {**_ENTITIES, **_repairs()}.items()]


@cache
def _repairs() -> dict[str, str]:
    """Returns ftfy's replacement of each character that it replaces, but for those that NFC does as well."""
    found = {}
    for character in map(chr, (number for number in range(_PLANE) if number not in _SURROGATES)):
        around = f"a{character}b"
        repaired = ftfy.fix_text(around)
        if repaired != unicodedata.normalize("NFC", around):
            found[character] = repaired[1:-1]
    return found


def _special(word: str) -> str:
    return {"<start_of_text>": _START, "<end_of_text>": _END}.get(word, word)
