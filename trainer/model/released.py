"""Tells what released weights are from their shapes and from the files of transformers beside them.

Shapes do not tell the activation, the number of heads, the preprocessing or the tokenizer: `config.json`,
`preprocessor_config.json` and the tokenizer's files do. What neither tells is said, not guessed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from open_clip.tokenizer import SimpleTokenizer

from trainer.checkpoint.weights import cause
from trainer.data.tokens import PLAIN_CAPTIONS
from trainer.errors import InputError
from trainer.model.catalog import known_models, read_config
from trainer.model.hub import VOCABULARIES
from trainer.model.key_names import Format, Weights
from trainer.model.text_source import TextSource
from trainer.safe_io.plain import read_json

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
UNKNOWN = "?"
_VISION = {
    "layers": 12,
    "width": 768,
    "head_width": 64,
    "mlp_ratio": 4.0,
    "patch_size": 16,
    "image_size": 224,
}
_TEXT = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12, "mlp_ratio": 4.0}
"""Values that open_clip's towers have where a config is silent."""
_HEAD, _EPS, _OPENAI_WORDS, _OPENAI_END = 64, 1e-5, 49406, 49407
_TANH = ("gelu_new", "gelu_pytorch_tanh")
_INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
_LEGACY_END = 2
"""End of a caption by the config of OpenAI's models, for which transformers takes the largest token."""


@dataclass
class Released:
    """Facts about released weights."""

    config: dict[str, Any]
    """The model's config in open_clip's format; without a part where it is not known."""
    keys: dict[str, Any] = field(default_factory=dict)
    """Keys of [model] about pictures."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what cannot be known."""
    complete: bool = True
    """True if nothing of the config is unknown."""


def released(weights: Weights, kind: Format, folder: Path) -> Released:
    """Returns what the weights, under open_clip's names, and the files beside them say. Raises InputError."""
    config = _json(folder / CONFIG)
    found = Released({"embed_dim": weights["visual.proj"].shape[1]})
    found.config["vision_cfg"] = _vision(weights, _part(config, "vision_config"))
    parts = ["vision_config"]
    if kind == "transformers CLIPModel":
        parts.append("text_config")
        found.config["text_cfg"] = _text(weights, _part(config, "text_config"))
        _tokenizer(found, folder)
    if kind == "Chinese-CLIP":  # its code has no other
        found.config["quick_gelu"] = True
    elif config is None:
        found.complete = False
    else:
        _activation(found, [_part(config, part) for part in parts], folder / CONFIG)
    _pictures(found, kind, _json(folder / PREPROCESSOR))
    return found


def names_of(config: Mapping[str, Any]) -> list[str]:
    """Returns open_clip's models that have this config, the shortest name first.

    A config without text_cfg is that of any text tower.
    """
    wanted = _whole(config)
    names = [name for name in known_models() if _fits(read_config(name), wanted)]
    return sorted(names, key=lambda name: (len(name), name))


def _fits(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    parts = {key: value for key, value in known.items() if key != "text_cfg" or key in wanted}
    return _whole(parts) == wanted


def _whole(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with the defaults of its parts."""
    parts = {"vision_cfg": _VISION, "text_cfg": _TEXT}
    whole = {key: {**parts[key], **value} if key in parts else value for key, value in config.items()}
    return {key: value for key, value in whole.items() if value is not False}


def _vision(weights: Weights, about: Mapping[str, Any]) -> dict[str, Any]:
    width, _, patch, _ = weights["visual.conv1.weight"].shape
    grid = round((len(weights["visual.positional_embedding"]) - 1) ** 0.5)
    return {
        "image_size": grid * patch,
        "patch_size": patch,
        "width": width,
        "head_width": width // int(about.get("num_attention_heads") or max(1, width // _HEAD)),
        **_blocks(weights, "visual.transformer.resblocks.", width, about),
    }


def _text(weights: Weights, about: Mapping[str, Any]) -> dict[str, Any]:
    vocabulary, width = weights["token_embedding.weight"].shape
    end = about.get("eos_token_id")
    pooled = {} if end in (None, _LEGACY_END, vocabulary - 1) else {"pool_type": "eos", "eos_id": end}
    return {
        "context_length": len(weights["positional_embedding"]),
        "vocab_size": vocabulary,
        "width": width,
        "heads": int(about.get("num_attention_heads") or max(1, width // _HEAD)),
        **_blocks(weights, "transformer.resblocks.", width, about),
        **pooled,
    }


def _blocks(weights: Weights, start: str, width: int, about: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name.removeprefix(start).split(".")[0] for name in weights if name.startswith(start)}
    eps = about.get("layer_norm_eps", _EPS)
    return {
        "layers": len(numbers),
        "mlp_ratio": weights[f"{start}0.mlp.c_fc.weight"].shape[0] / width,
        **({} if eps == _EPS else {"norm_kwargs": {"eps": eps}}),
    }


def _activation(found: Released, parts: list[Mapping[str, Any]], path: Path) -> None:
    acts = {str(part.get("hidden_act", "quick_gelu")) for part in parts}  # transformers' own default
    (act,) = acts if len(acts) == 1 else (" and ".join(sorted(acts)),)
    if act == "quick_gelu":
        found.config["quick_gelu"] = True
    elif act in _TANH:
        for part in ("vision_cfg", "text_cfg"):
            if part in found.config:
                found.config[part]["act_kwargs"] = {"approximate": "tanh"}
    elif act != "gelu":
        allowed = ", ".join(("quick_gelu", "gelu", *_TANH))
        raise InputError(
            f"{path}: hidden_act is {act}: a model of open_clip has one of {allowed} for both towers"
        )


def _tokenizer(found: Released, folder: Path) -> None:
    """Adds a tokenizer that is not OpenAI's to the config; says if there is none to look at."""
    text, whole = found.config["text_cfg"], _json(folder / "tokenizer.json")
    words = dict(_json(folder / "vocab.json") or _part(_part(whole, "model"), "vocab"))
    if not words and not any((folder / name).is_file() for name in VOCABULARIES):
        found.notes.append(
            "the tokenizer is taken to be OpenAI's: no vocabulary, as in vocab.json or tokenizer.json, lies "
            "beside the weights"
        )
        return
    listed = (whole or {}).get("added_tokens")
    added = [*listed] if isinstance(listed, list) else []
    added += _part(_json(folder / "tokenizer_config.json"), "added_tokens_decoder").values()
    names = {str(token.get("content")) for token in added if isinstance(token, dict)}
    names |= (_json(folder / "added_tokens.json") or {}).keys()
    simple = SimpleTokenizer(context_length=text["context_length"])
    text["hf_tokenizer_name"] = str(folder.absolute())
    if _plain(words) != _plain(simple.encoder) or len(words.keys() | names) != len(simple.encoder):
        return
    if find_spec("transformers") is None:
        found.notes.append(
            "the tokenizer is taken to be OpenAI's, as it has the same words. Whether it reads captions "
            "alike, only transformers can tell: `pip install transformers`, and import again"
        )
    elif _tokens(simple) != _tokens(_loaded(text)):
        return
    del text["hf_tokenizer_name"]


def _loaded(text: Mapping[str, Any]) -> Any:
    source = TextSource({**text, "tokenizer_kwargs": {"padding_side": "right"}}, {}, own_tower=False)
    try:
        tokenizer = source.tokenizer()
        tokenizer([""])
    except InputError:
        raise
    except Exception as error:  # the files may be anything
        folder = text["hf_tokenizer_name"]
        raise InputError(
            f"transformers cannot use the tokenizer in {folder} ({cause(error)}): mend its files, or remove "
            "them if it is OpenAI's"
        ) from None
    return tokenizer


def _plain(words: Mapping[str, Any]) -> dict[str, int]:
    """Returns the words without the two special ones, whose names differ."""
    return {word: n for word, n in words.items() if isinstance(n, int) and n < _OPENAI_WORDS}


def _tokens(tokenizer: Any) -> list[list[int]]:
    """Returns the tokens of plain captions, each up to its end: a model computes its features from these."""
    rows = tokenizer([*PLAIN_CAPTIONS, "many words " * 100, ""]).tolist()
    return [row[: row.index(_OPENAI_END) + 1] if _OPENAI_END in row else row for row in rows]


def _pictures(found: Released, kind: Format, about: Mapping[str, Any] | None) -> None:
    """Adds the keys of [model] about pictures."""
    if about is None:
        chinese = kind != "transformers CLIPModel"
        found.keys |= {"image_resize_mode": "squash"} if chinese else {}
        if kind != "Chinese-CLIP":  # whose own code says it
            whose = "Chinese-CLIP" if chinese else "OpenAI"
            found.notes.append(
                f"mean, deviation and resizing are taken to be {whose}'s: no {PREPROCESSOR} lies beside the "
                "weights"
            )
        return
    normalized = about.get("do_normalize", True)
    found.keys["image_mean"] = list(about.get("image_mean", OPENAI_DATASET_MEAN)) if normalized else [0.0] * 3
    found.keys["image_std"] = list(about.get("image_std", OPENAI_DATASET_STD)) if normalized else [1.0] * 3
    found.keys["image_interpolation"] = _INTERPOLATIONS.get(about.get("resample", 3), UNKNOWN)
    found.keys["image_resize_mode"] = _resize_mode(about)
    found.notes += _odd_pictures(found, about)


def _resize_mode(about: Mapping[str, Any]) -> str:
    size = about.get("size", {})
    both = isinstance(size, dict) and "height" in size
    return "squash" if both else "shortest"


def _odd_pictures(found: Released, about: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each thing that no key of [model] says."""
    edge = found.config["vision_cfg"]["image_size"]
    sizes = about.get("size", {})
    edges = set(sizes.values()) if isinstance(sizes, dict) else {sizes}
    if not edges <= {edge}:
        yield f"{PREPROCESSOR} resizes to {sizes}, and Clipship to the {edge} pixels that the model takes"
    if found.keys["image_interpolation"] == UNKNOWN:
        yield f"{PREPROCESSOR} has resample = {about.get('resample')}, which no key of [model] says"


def _json(path: Path) -> dict[str, Any] | None:
    """Returns the content of a file; None if there is none. Raises InputError for one that is no table."""
    try:
        content = read_json(path, links=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        raise InputError(f"{path} cannot be read: {problem}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no table of keys")
    return content


def _part(config: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    part = (config or {}).get(name)
    return part if isinstance(part, dict) else {}
