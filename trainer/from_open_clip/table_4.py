"""Flags that open_clip_train has from release 4 on: rows of those that become keys, names of the others.

The rows have the topics of table.py, and one of their own for images of any shape.
"""

from dataclasses import replace

from trainer.from_open_clip import data_flags, naflex_flags, optim_flags
from trainer.from_open_clip.rows import (
    NUMBER,
    SWITCH,
    TEXT,
    TEXTS,
    a_count,
    a_text,
    key,
    missing,
    only_json,
    only_shards,
    only_with,
)
from trainer.from_open_clip.translation import Flag, copy, switch

_NAFLEX = only_with("--use-naflex")

_ROWS: dict[str, tuple[Flag, ...]] = {
    "Training data": (
        key(
            "--image-key",
            a_text("jpg;png;jpeg;webp"),
            "data.image_key",
            data_flags.image_key,
            "The same endings, as a list.",
            idle=only_shards,
        ),
        key(
            "--max-image-pixels",
            a_count(25_000_000),
            "data.max_image_pixels",
            data_flags.max_image_pixels,
            "The same, for shards; larger images are bad samples, which are counted. With 0 Pillow's limit "
            "holds there, which is written out.",
        ),
        key(
            "--text-key",
            a_text("txt"),
            "data.caption_key",
            data_flags.text_key,
            "The same ending of a member with plain text; several are refused.",
            idle=only_shards,
        ),
        key(
            "--json-text-key",
            TEXT,
            "data.caption_key data.caption_choice",
            data_flags.json_text_key,
            'Fields of the sample\'s JSON: `a;b` becomes `["json:a", "json:b"]`, and the first one that a '
            "sample has is taken.",
            idle=only_shards,
        ),
        key(
            "--json-text-key-probs",
            {"type": float, "nargs": "+"},
            "data.caption_weights",
            data_flags.json_text_weights,
            "The same, one for each field. 0, which makes a caption stand in for the others, is refused.",
            idle=only_json,
        ),
    ),
    "Batch, length and optimizer": (
        key(
            "--text-layer-decay",
            NUMBER,
            "optim.text_layer_decay",
            copy(),
            "The same factor. All that is behind the blocks has the whole learning rate; there, the last "
            "norm has that of the last block.",
        ),
        key(
            "--image-layer-decay",
            NUMBER,
            "optim.image_layer_decay",
            copy(),
            "The same; and timm's last layer has the whole rate, which there stands below a projection.",
            also="--visual-layer-decay",
        ),
        key("--wd-exclude", TEXTS, "optim.no_decay", optim_flags.wd_exclude, "The same patterns."),
    ),
    "Ranks": (
        key("--fsdp", SWITCH, "comm.backend", switch("fsdp"), "`fsdp`."),
        key(
            "--fsdp-no-reshard-after-forward",
            SWITCH,
            "comm.fsdp.reshard_after_forward",
            switch(False),
            "`false`.",
            idle=only_with("--fsdp"),
        ),
    ),
    "Images of any shape (NaFlex)": (
        key(
            "--use-naflex",
            SWITCH,
            "model.image_tokens",
            naflex_flags.use_naflex,
            "Images of any shape, for a model with naflex in its name; others, whose towers it converts, are "
            "refused. `--aug-cfg` has `use_timm`, as there.",
        ),
        key(
            "--naflex-patch-sizes",
            {"type": int, "nargs": "+"},
            "model.image_patches",
            naflex_flags.patches,
            "The same sizes: each step draws one. Evaluation takes that of the tower, and there the first.",
            idle=_NAFLEX,
        ),
        key(
            "--naflex-patch-size-probs",
            {"type": float, "nargs": "+"},
            "model.image_patches_weights",
            naflex_flags.patch_weights,
            "The same, one for each size; 0 is refused.",
            idle=_NAFLEX,
        ),
        key(
            "--naflex-seq-lens",
            {"type": int, "nargs": "+"},
            "model.image_tokens model.image_tokens_weights",
            naflex_flags.token_budgets,
            "The same numbers of patches: each step draws one, for all ranks. A global batch is always as "
            "large: it has the mean of the samples there, and each number as large a share of the samples.",
            idle=_NAFLEX,
        ),
        key(
            "--naflex-seq-len-probs",
            {"type": float, "nargs": "+"},
            "model.image_tokens_weights",
            naflex_flags.part_of_the_batch,
            "Part of these weights: how often a batch there has each, times its samples.",
            idle=_NAFLEX,
        ),
        key(
            "--naflex-max-tokens-per-batch",
            a_count(16384),
            "optim.max_image_tokens_per_gpu optim.global_batch_size",
            naflex_flags.tokens_of_a_pass,
            "The same limit of one pass; a step passes in as many parts as it needs. The global batch "
            "follows from it, too, since `--batch-size` has no effect.",
            idle=_NAFLEX,
        ),
        key(
            "--naflex-batch-divisor",
            a_count(8),
            "optim.global_batch_size",
            naflex_flags.part_of_the_batch,
            "Part of the global batch.",
            idle=_NAFLEX,
        ),
    ),
}

ADDED = {topic: tuple(replace(flag, release="4") for flag in flags) for topic, flags in _ROWS.items()}
"""Flags of release 4 alone that become keys, by topic, in the order of the page."""

_NAMES = """
    --length-bucketing --bucket-pool --bucket-chunk --bucket-prefetch-pools --text-pad-multiple
    --torchcompile-strategy --torchcompile-backend --torchcompile-mode
    --opt-kwargs --opt-fallback-list --text-pooler-own-group
    --val-retrieval-chunk-size --val-retrieval-precision
    --log-metric-every-n-steps --train-loss-ema-samples
    --fsdp-offload-cpu --fsdp-checkpoint
    --force-naflex-vision --naflex-num-train-image-tokens --naflex-max-text-tokens
    --naflex-loss-scale --naflex-pad-multiple
    --audio-ext --pretrained-audio --audio-fill --audio-trunc --audio-fusion --audio-int16-normalize
    --audio-multiprocessing-context --audio-layer-decay
    --audio-zeroshot-dataset --audio-zeroshot-split --audio-zeroshot-template
    --audio-zeroshot-audio-key --audio-zeroshot-target-key --audio-zeroshot-class-key
    --audio-zeroshot-workers --audio-zeroshot-multiprocessing-context
"""
NOT_SUPPORTED = tuple(
    missing(name, {"nargs": "*"}, "release 4 of open_clip_torch is not published", release="4")
    for name in _NAMES.split()
)
"""The other flags of release 4; what each takes does not matter."""
