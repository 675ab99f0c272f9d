"""Writes a trained model in the form of transformers: as a CLIPModel or a ChineseCLIPModel."""

from collections.abc import Mapping
from typing import Any

import open_clip
from open_clip.transformer import VisionTransformer

from trainer.errors import InputError
from trainer.model.exported import WEIGHTS, Export
from trainer.model.key_names import Format, from_open_clip
from trainer.model.text_tower import TextTower
from trainer.run.checkpoints import MODEL_CONFIG


def write_transformers(made: Export) -> None:
    """`CLIPModel.from_pretrained`, or `ChineseCLIPModel.from_pretrained` for a BERT with pooling cls."""
    from trainer.model.transformers_tokenizer import write_openai_tokenizer, write_tokenizer  # an extra

    kind, config = _transformers_config(made)
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
        "hidden_size": block.attn.out_proj.in_features,
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
