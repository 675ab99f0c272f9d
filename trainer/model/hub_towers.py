"""Sizes of the text towers on the Hugging Face hub that configs of open_clip and Chinese-CLIP name, by name.

They are the values of each model's config.json there that make its shape. Imports no torch.
"""

from collections.abc import Mapping
from typing import Any

_ROBERTA = {
    "model_type": "roberta",
    "vocab_size": 50265,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_XLM_ROBERTA = {**_ROBERTA, "model_type": "xlm-roberta", "vocab_size": 250002}
_NLLB = {
    "model_type": "m2m_100",
    "vocab_size": 256206,
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "max_position_embeddings": 1024,
    "pad_token_id": 1,
    "scale_embedding": True,
}
_MT5 = {
    "model_type": "mt5",
    "vocab_size": 250112,
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 12,
    "num_decoder_layers": 12,
    "num_heads": 12,
    "feed_forward_proj": "gated-gelu",
    "pad_token_id": 0,
    "is_encoder_decoder": True,
}
_CHINESE = {
    "model_type": "bert",
    "vocab_size": 21128,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
_MODERN_BERT = {
    "model_type": "modernbert",
    "vocab_size": 50368,
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "max_position_embeddings": 8192,
    "pad_token_id": 50283,
    "bos_token_id": 50281,
    "cls_token_id": 50281,
    "eos_token_id": 50282,
    "sep_token_id": 50282,
}
HUB_TOWERS: Mapping[str, Mapping[str, Any]] = {
    "roberta-base": _ROBERTA,
    "xlm-roberta-base": _XLM_ROBERTA,
    "xlm-roberta-large": {
        **_XLM_ROBERTA,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "hfl/chinese-roberta-wwm-ext": _CHINESE,
    "hfl/chinese-roberta-wwm-ext-large": {
        **_CHINESE,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "hfl/rbt3": {**_CHINESE, "num_hidden_layers": 3},
    "facebook/nllb-200-distilled-600M": _NLLB,
    "facebook/nllb-200-distilled-1.3B": {
        **_NLLB,
        "encoder_layers": 24,
        "decoder_layers": 24,
        "encoder_ffn_dim": 8192,
        "decoder_ffn_dim": 8192,
    },
    "Alibaba-NLP/gte-modernbert-base": _MODERN_BERT,
    "google/mt5-base": _MT5,
    "google/mt5-xl": {
        **_MT5,
        "d_model": 2048,
        "d_ff": 5120,
        "num_layers": 24,
        "num_decoder_layers": 24,
        "num_heads": 32,
    },
}
