"""Writes a trained model in the form of transformers, with its tokenizer: CLIPModel or ChineseCLIPModel.

open_clip cleans a caption with ftfy before its tokenizer sees it: curly quotes, ligatures, full-width letters
and punctuation. transformers does none of it, so that the tokenizer's own normalizer has to.
"""

import unicodedata
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import ftfy
import open_clip
from open_clip.transformer import VisionTransformer

from trainer.errors import InputError
from trainer.model.exported import WEIGHTS, Export
from trainer.model.key_names import Format, from_open_clip
from trainer.model.text_tower import TextTower
from trainer.run.checkpoints import MODEL_CONFIG

if TYPE_CHECKING:
    from tokenizers import Tokenizer, normalizers


def write_transformers(made: Export) -> None:
    """`CLIPModel.from_pretrained`, or `ChineseCLIPModel.from_pretrained` for a BERT with pooling cls."""
    kind, config = transformers_config(made)
    made.write_weights(WEIGHTS, from_open_clip(made.weights, kind))
    made.write("config.json", config)
    made.write("preprocessor_config.json", _preprocessor(made, kind))
    if kind == "transformers CLIPModel":
        write_openai_tokenizer(made)
        return
    for name, content in made.clip.files.items():
        if name not in (MODEL_CONFIG, "config.json"):
            (made.folder / name).write_bytes(content)
    write_tokenizer(made)


def transformers_config(made: Export) -> tuple[Format, dict[str, Any]]:
    """Returns transformers' kind of the model, and its config. Raises InputError if it has none."""
    image, model = made.clip.model.visual, made.clip.model
    if reason := _not_in_transformers(image, made.text, model) or _other_words(made):
        raise InputError(
            f"--to {made.to}: transformers has no such model: {reason}; --to open_clip takes every model"
        )
    config = made.config
    vision = _sizes(image, config["vision_cfg"], config)
    vision |= {"image_size": _edge(made, image), "patch_size": _edge(made, image, "patch_size")}
    width = config["embed_dim"]
    common = {"vision_config": vision, "projection_dim": width, "torch_dtype": "float32"}
    if isinstance(made.text, TextTower):
        text = made.text.config.to_dict()
        about = {"architectures": ["ChineseCLIPModel"], "model_type": "chinese_clip"}
        return "transformers ChineseCLIPModel", {**about, **common, "text_config": text}
    text = _sizes(model, config["text_cfg"], config)
    text |= {"vocab_size": model.vocab_size, "max_position_embeddings": model.context_length}
    text |= {"bos_token_id": 49406, "eos_token_id": 49407, "pad_token_id": 0, "projection_dim": width}
    about = {"architectures": ["CLIPModel"], "model_type": "clip"}
    return "transformers CLIPModel", {**about, **common, "text_config": text}


def _not_in_transformers(image: Any, text: Any, model: Any) -> str:
    """Returns why neither CLIPModel nor ChineseCLIPModel can hold the model; "" if one can."""
    if not isinstance(image, VisionTransformer) or image.attn_pool is not None or image.pool_type != "tok":
        return "its image tower is not a ViT with a class token"
    if getattr(model, "logit_bias", None) is not None:
        return "it has a logit bias"
    if isinstance(text, TextTower):
        plain = text.config.model_type == "bert" and type(text.pooler).__name__ == "ClsLastHiddenStatePooler"
        linear = type(text.proj).__name__ == "Linear"
        return (
            ""
            if plain and linear
            else "its text tower is not a BERT with cls pooling and a linear projection"
        )
    if (
        text is not None
        or not isinstance(model, open_clip.CLIP)
        or model.text_pool_type not in ("argmax", "eos")
    ):
        return "its text tower is not that of OpenAI's CLIP"
    return ""


def _other_words(made: Export) -> str:
    """Returns why CLIPModel cannot take the model's tokenizer, as its form has OpenAI's; "" if it can."""
    tokenizer = getattr(made.clip.tokenizer, "tokenizer", None)  # that of another library
    if isinstance(made.text, TextTower) or tokenizer is None or tokenizer.get_vocab() == _openai_words():
        return ""
    return "its tokenizer has other words than OpenAI's"


def _sizes(tower: Any, part: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of a tower's transformer by transformers' names."""
    block = tower.transformer.resblocks[0]
    return {
        "hidden_size": block.attn.out_proj.in_features,
        "num_attention_heads": block.attn.num_heads,
        "num_hidden_layers": len(tower.transformer.resblocks),
        "intermediate_size": block.mlp.c_fc.out_features,
        "hidden_act": "quick_gelu" if config.get("quick_gelu") else "gelu",
        "layer_norm_eps": block.ln_1.eps,
    }


def _edge(made: Export, image: Any, name: str = "image_size") -> int:
    height, width = getattr(image, name)
    if height != width:
        raise InputError(
            f"--to {made.to}: transformers has no {name} of {height} x {width}; --to open_clip takes it"
        )
    return int(height)


def _preprocessor(made: Export, kind: Format) -> dict[str, Any]:
    image: Any = made.clip.model.visual
    preprocess = image.preprocess_cfg
    edge, squash = _edge(made, image), preprocess["resize_mode"] == "squash"
    name = "CLIP" if kind == "transformers CLIPModel" else "ChineseCLIP"
    return {
        "image_processor_type": f"{name}ImageProcessor",
        "do_resize": True,
        "size": {"height": edge, "width": edge} if squash else {"shortest_edge": edge},
        "do_center_crop": not squash,
        "crop_size": {"height": edge, "width": edge},
        "do_normalize": True,
        "image_mean": list(made.clip.mean),
        "image_std": list(made.clip.std),
        "resample": 3 if preprocess["interpolation"] == "bicubic" else 2,
    }


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
    vocabulary = _openai_words()
    made.write("vocab.json", vocabulary)
    merges = "\n".join(" ".join(pair) for pair in simple.bpe_ranks)
    (made.folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    ends = {"bos_token": _START, "eos_token": _END, "unk_token": _END, "pad_token": _END}
    _write(made, _openai(vocabulary, list(simple.bpe_ranks)), ends)


def _openai_words() -> dict[str, int]:
    encoder = open_clip.tokenizer.SimpleTokenizer().encoder
    return {_special(word): number for word, number in encoder.items()}


def write_tokenizer(made: Export) -> None:
    """Writes the tokenizer of a text tower of transformers; one that is written in Python stays as it is."""
    from tokenizers import Tokenizer, normalizers  # an extra

    tokenizer: Any = made.clip.tokenizer.tokenizer  # type: ignore[attr-defined]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        cleaning = Tokenizer.from_str(backend.to_str())
        own = [cleaning.normalizer] if cleaning.normalizer is not None else []
        cleaning.normalizer = normalizers.Sequence([*_cleaning(), *own])
        _write(made, cleaning, dict(tokenizer.special_tokens_map))


def _write(made: Export, tokenizer: "Tokenizer", special: dict[str, str]) -> None:
    (made.folder / TOKENIZER).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    length = made.clip.tokenizer([""]).shape[1]
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": int(length)}
    inputs = {"model_input_names": ["input_ids", "attention_mask"]}
    made.write("tokenizer_config.json", {**about, **special, **inputs})


def _openai(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

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


def _cleaning() -> "list[normalizers.Normalizer]":
    from tokenizers import normalizers

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
