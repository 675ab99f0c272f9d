"""Decides where a model's text tower and tokenizer of Hugging Face come from, and how open_clip builds them.

A tower of open_clip's own needs nothing of this.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from open_clip import tokenizer as open_clip_tokenizer
from torch import nn

from trainer.config import Model
from trainer.config.training import is_config_file
from trainer.data.tokens import PLAIN_CAPTIONS, Tokenizer
from trainer.errors import InputError
from trainer.model.catalog import FOLDER, config_file
from trainer.model.foreign_code import SAFELY, runs_no_code
from trainer.model.hub import CONFIG, TOKENIZER_FILES, VOCABULARIES, has_weights, model_folder
from trainer.model.text_config import text_config
from trainer.model.text_tower import TextTower, pools_first_token


@dataclass(frozen=True)
class TextSource:
    """Text part of a model's config, with folders in place of names on a hub."""

    config: Mapping[str, Any]
    """open_clip's text_cfg, with a folder as hf_model_name and as hf_tokenizer_name."""
    names: Mapping[str, Any]
    """The same as everybody can use it: with the names on the hub, if there are any."""
    own_tower: bool
    """True if the tower is transformers', False if only the tokenizer is."""

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Arguments by which `open_clip.create_model` builds this tower."""
        return {"text_cfg": dict(self.config), "force_custom_text": True} if self.own_tower else {}

    def with_settings(self, settings: Mapping[str, Any]) -> "TextSource":
        """Returns the source with settings of the tokenizer that take precedence over those of its files."""
        both = {"tokenizer_kwargs": {**(self.config.get("tokenizer_kwargs") or {}), **settings}}
        return replace(self, config={**self.config, **both}, names={**self.names, **both})

    def tokenizer(self) -> Any:
        """Returns open_clip's HFTokenizer, made from the folder."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # each loader process has one core
        folder = self.config["hf_tokenizer_name"]
        with runs_no_code(folder):
            return open_clip_tokenizer.HFTokenizer(
                folder,
                context_length=self.config["context_length"],
                tokenizer_mode=self.config.get("tokenizer_mode"),
                **(self.config.get("tokenizer_kwargs") or {}),
                **SAFELY,
            )

    def files(self) -> dict[str, bytes]:
        """Returns the tokenizer's files and the tower's config.json, by name: what a checkpoint keeps."""
        paths = [Path(self.config["hf_tokenizer_name"], name) for name in TOKENIZER_FILES]
        if self.own_tower:
            paths.append(Path(self.config["hf_model_name"], CONFIG))
        return {path.name: path.read_bytes() for path in paths if path.is_file()}


def text_source(settings: Model, config: Mapping[str, Any], *, weights: bool) -> TextSource | None:
    """Returns the source of a model's text part; None if open_clip has all of it.

    `config` is the model's own in open_clip's format. With `weights`, the tower begins with the weights of
    its folder; a folder without any gives random ones. Raises InputError, and what huggingface_hub raises.
    """
    text = _beside(settings, text_config(settings, config))
    tower, tokenizer = text.get("hf_model_name"), text.get("hf_tokenizer_name") or text.get("hf_model_name")
    if not tokenizer:
        return None
    cache = settings.cache_dir
    if not tower:
        places = {**text, "hf_tokenizer_name": str(model_folder(tokenizer, cache, {"tokenizer"}))}
        return TextSource(places, text, own_tower=False)
    weights = weights and (not tower.startswith("/") or has_weights(Path(tower)))
    folder = model_folder(tower, cache, {"config", "weights"} if weights else {"config"})
    places = {**text, "hf_model_name": str(folder), "hf_model_pretrained": weights}
    places["hf_tokenizer_name"] = str(model_folder(tokenizer, cache, {"tokenizer"}))
    return TextSource(places, text, own_tower=True)


def fit_tokenizer(source: TextSource, model: nn.Module) -> tuple[TextSource, Tokenizer, tuple[str, ...]]:
    """Returns the source with the settings that the model's text tower needs, the tokenizer and notes.

    Raises InputError for a tokenizer whose tokens the tower would misread.
    """
    tokenizer, tower = source.tokenizer(), getattr(model, "text", None)
    words = tokenizer.tokenizer
    own = tower.transformer.get_input_embeddings() if isinstance(tower, TextTower) else None
    rows = len((own or getattr(tower or model, "token_embedding")).weight)  # noqa: B009  # a Module's has no type
    changes: dict[str, Any] = {}
    if words.padding_side != "right" and (source.own_tower or not source.config.get("no_causal_mask")):
        changes["padding_side"] = "right"
    without_row = sorted(word for word, number in words.get_vocab().items() if number >= rows)
    if without_row and set(without_row) <= set(words.all_special_tokens):
        changes["split_special_tokens"] = True  # a caption that spells one gets the tokens of its letters
        without_row.clear()
    if changes:
        source = source.with_settings(changes)
        tokenizer = source.tokenizer()
    problems = [
        f"{len(without_row)} of its tokens, such as {word!r:.80}, have no row among the tower's {rows}"
        for word in without_row[:1]
    ]
    problems += _misread(source, tokenizer, tower)
    folder = {**source.config, **source.names}["hf_tokenizer_name"]
    if problems:
        raise InputError(
            f"model: the tokenizer {folder} does not fit the text tower: {'; '.join(problems)}. Give the "
            "tokenizer that the tower was made for."
        )
    notes = [
        f"the tokenizer {folder} pads on the left, where the text tower starts to read: padded on the right"
    ]
    return source, tokenizer, tuple(notes[: "padding_side" in changes])


def _misread(source: TextSource, tokenizer: Any, tower: nn.Module | None) -> Iterator[str]:
    """Yields what is wrong with the token that a caption's features come from, and with the padding."""
    words, rows = tokenizer.tokenizer, tokenizer(list(PLAIN_CAPTIONS)).tolist()
    if isinstance(tower, TextTower):
        if words.pad_token_id != (pad := tower.config.pad_token_id):
            yield f"it pads with token {words.pad_token_id}, and the tower's config has pad_token_id = {pad}"
        if pools_first_token(tower) and len({row[0] for row in rows}) > 1:
            yield "it puts no token before a caption, and the features are those of the first token"
        return
    pool, end = source.config.get("pool_type", "argmax"), source.config.get("eos_id", 2)
    for caption, row in zip(PLAIN_CAPTIONS, rows, strict=True):
        last = len(words(tokenizer.clean_fn(caption)).input_ids) - 1
        pooled = row.index(max(row)) if pool == "argmax" else row.index(end) if end in row else 0
        if pool in ("argmax", "eos") and last < len(row) and pooled != last:
            yield (
                f"the features of {caption!r} would be those of token {pooled + 1} and not of its end, token "
                f'{last + 1}: set "pool_type": "eos" and "eos_id": {row[last]} in text_cfg if it is new'
            )
            return


def _beside(settings: Model, text: dict[str, Any]) -> dict[str, Any]:
    """Returns the text_cfg of a model in a folder with that folder as the place of its files.

    So it is for a config file, such as `clipship export` writes, if the folder that it names is gone and the
    files lie beside it: they were moved together.
    """
    in_folder = settings.name.startswith(FOLDER)
    if settings.text is not None or not (in_folder or is_config_file(settings.name)):
        return text
    folder = config_file(settings.name).parent
    names = [name for name in ("hf_model_name", "hf_tokenizer_name") if text.get(name)]
    if not in_folder:
        beside = VOCABULARIES & {file.name for file in folder.iterdir()}
        # `Path.exists` raises where a folder above may not be entered.
        gone = [name for name in names if text[name].startswith("/") and not os.path.exists(text[name])]
        names = gone if beside else []
    if not (folder / CONFIG).is_file():
        names = [name for name in names if name != "hf_model_name"]
    return text | dict.fromkeys(names, os.path.abspath(folder))
