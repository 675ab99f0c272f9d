"""Writes a trained model in the form that other programs load, with a model card.

`FORMATS` has the forms. Each is a folder that needs nothing else.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.transformer import VisionTransformer
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.config import Job
from trainer.errors import InputError
from trainer.model.build import Clip, untrained
from trainer.model.key_names import Format, from_open_clip
from trainer.model.text_tower import TextTower
from trainer.run.checkpoints import MODEL_CONFIG
from trainer.sysinfo.extras import require

OPEN_CLIP_CONFIG = "open_clip_config.json"
OPEN_CLIP_WEIGHTS = "open_clip_model.safetensors"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Export:
    """A trained model that is being exported."""

    job: Job
    clip: Clip
    folder: Path

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's parameters and buffers by open_clip's names."""
        return {name: tensor.contiguous() for name, tensor in self.clip.model.state_dict().items()}

    @property
    def config(self) -> dict[str, Any]:
        """The model's config in open_clip's format, with what the job has changed."""
        config: dict[str, Any] = json.loads(self.clip.files[MODEL_CONFIG])
        for part, changes in self.job.model.tower_changes.items():
            config[part] = {**config[part], **changes}
        config["vision_cfg"].pop("patch_dropout", None)
        if getattr(self.clip.model, "logit_bias", None) is not None:
            config["init_logit_bias"] = -10
        if isinstance(self.text, TextTower):
            config["custom_text"] = True
            config["text_cfg"] = self._text_config(config["text_cfg"])
        return config

    @property
    def text(self) -> Any:
        """The text tower; None if it is a part of the model itself, as in OpenAI's CLIP."""
        return getattr(self.clip.model, "text", None)

    def _text_config(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the text_cfg; a tower that came from a folder is found in the exported one."""
        here = os.path.abspath(self.folder)
        places = {name: text[name] for name in ("hf_model_name", "hf_tokenizer_name")}
        return {
            **text,
            **{name: here if str(place).startswith("/") else place for name, place in places.items()},
        }

    def write(self, name: str, content: Any) -> None:
        """Writes an object as JSON."""
        text = json.dumps(content, indent=2, ensure_ascii=False, default=list) + "\n"
        (self.folder / name).write_text(text, encoding="utf-8")


def export(job: Job, folder: Path, to: str) -> Export:
    """Writes the model of a job, whose `pretrained` are its weights, into an empty folder.

    Raises InputError if the form cannot hold this model.
    """
    made = Export(job, untrained(job), folder)
    made.clip.model.eval()
    FORMATS[to](made)
    return made


def _open_clip(made: Export) -> None:
    """`open_clip.create_model_and_transforms("local-dir:FOLDER")`."""
    save_file(made.weights, made.folder / OPEN_CLIP_WEIGHTS)
    preprocess = dict(made.clip.model.visual.preprocess_cfg)  # type: ignore[union-attr, arg-type]
    made.write(OPEN_CLIP_CONFIG, {"model_cfg": made.config, "preprocess_cfg": preprocess})
    _text_files(made)


def _safetensors(made: Export) -> None:
    """Weights by open_clip's names, and the model's config beside them."""
    save_file(made.weights, made.folder / WEIGHTS)
    made.write(MODEL_CONFIG, made.config)
    _text_files(made)


def _text_files(made: Export) -> None:
    for name, content in made.clip.files.items():
        if name != MODEL_CONFIG:
            (made.folder / name).write_bytes(content)


def _transformers(made: Export) -> None:
    """`CLIPModel.from_pretrained`, or `ChineseCLIPModel.from_pretrained` for a BERT with pooling cls."""
    kind, config = _transformers_config(made)
    save_file(from_open_clip(made.weights, kind), made.folder / WEIGHTS, metadata={"format": "pt"})
    made.write("config.json", config)
    made.write("preprocessor_config.json", _preprocessor(made, kind))
    if kind == "transformers CLIPModel":
        _clip_tokenizer(made)
    else:
        for name, content in made.clip.files.items():
            if name not in (MODEL_CONFIG, "config.json"):
                (made.folder / name).write_bytes(content)


def _transformers_config(made: Export) -> tuple[Format, dict[str, Any]]:
    """Returns transformers' kind of the model, and its config. Raises InputError if it has none."""
    image, model = made.clip.model.visual, made.clip.model
    if reason := _not_in_transformers(image, made.text, model):
        raise InputError(
            f"--to hf: transformers has no such model: {reason}; --to open_clip takes every model"
        )
    config = made.config
    vision = _sizes(image, config["vision_cfg"], config)
    vision |= {"image_size": _edge(image), "patch_size": _edge(image, "patch_size")}
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


def _sizes(tower: Any, part: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of a tower's transformer by transformers' names."""
    block = tower.transformer.resblocks[0]
    return {
        "hidden_size": block.attn.embed_dim,
        "num_attention_heads": block.attn.num_heads,
        "num_hidden_layers": len(tower.transformer.resblocks),
        "intermediate_size": block.mlp.c_fc.out_features,
        "hidden_act": "quick_gelu" if config.get("quick_gelu") else "gelu",
        "layer_norm_eps": block.ln_1.eps,
    }


def _edge(image: Any, name: str = "image_size") -> int:
    height, width = getattr(image, name)
    if height != width:
        raise InputError(
            f"--to hf: transformers has no {name} of {height} x {width}; --to open_clip takes it"
        )
    return int(height)


def _preprocessor(made: Export, kind: Format) -> dict[str, Any]:
    image: Any = made.clip.model.visual
    preprocess = image.preprocess_cfg
    edge, squash = _edge(image), preprocess["resize_mode"] == "squash"
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


def _clip_tokenizer(made: Export) -> None:
    """Writes open_clip's vocabulary as CLIPTokenizer reads it."""
    simple = open_clip.tokenizer.SimpleTokenizer()
    made.write("vocab.json", {_special(word): number for word, number in simple.encoder.items()})
    merges = "\n".join(" ".join(pair) for pair in simple.bpe_ranks)
    (made.folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    about = {"tokenizer_class": "CLIPTokenizer", "pad_token": "<|endoftext|>"}
    ends = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    length = made.clip.model.context_length
    made.write("tokenizer_config.json", {**about, **ends, "model_max_length": length})


def _special(word: str) -> str:
    return {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}.get(word, word)


def _onnx(made: Export) -> None:
    """Two graphs, images to features and tokens to features, of unit length and for any number of samples."""
    for module in ("onnx", "onnxscript"):
        require(module)
    height, width = made.clip.crop.size
    towers = {
        "images": (_Tower(made.clip.model, "encode_image"), torch.zeros(2, 3, height, width)),
        "tokens": (_Tower(made.clip.model, "encode_text"), made.clip.tokenizer(["a", "b"])),
    }
    for name, (tower, example) in towers.items():
        torch.onnx.export(
            tower.eval(),
            (example,),
            made.folder / f"{name}.onnx",
            input_names=[name],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    made.write(MODEL_CONFIG, made.config)
    _text_files(made)


class _Tower(nn.Module):
    """One tower as a model of its own."""

    def __init__(self, model: Any, encode: str) -> None:
        super().__init__()
        self.model, self._encode = model, encode

    def forward(self, samples: Tensor) -> Tensor:
        features: Tensor = getattr(self.model, self._encode)(samples, normalize=True)
        return features


FORMATS: Mapping[str, Callable[[Export], None]] = {
    "open_clip": _open_clip,
    "hf": _transformers,
    "safetensors": _safetensors,
    "onnx": _onnx,
}
"""Function that writes a form, by the form's name."""
