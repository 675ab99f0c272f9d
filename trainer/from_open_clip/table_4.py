"""Rows of the flags that open_clip_train has from release 4 on, by the topics of table.py.

Audio, which no job has, and images of any shape have topics of their own.
"""

from dataclasses import replace

from trainer.from_open_clip import data_flags, naflex_flags, optim_flags, run_flags
from trainer.from_open_clip.rows import (
    COUNT,
    NUMBER,
    SWITCH,
    TEXT,
    TEXTS,
    a_count,
    a_text,
    dropped,
    key,
    missing,
    one_of,
    only_audio,
    only_json,
    only_shards,
    only_text_groups,
    only_with,
    refused,
)
from trainer.from_open_clip.translation import Flag

_STARTS = ("fork", "forkserver", "spawn")
_AUDIO = "audio is not supported"
_ZERO_SHOT = only_with("--audio-zeroshot-dataset")
_NAFLEX = only_with("--use-naflex")
_BUCKETS = only_with("--length-bucketing")
_COMPILED = only_with("--torchcompile")
_FSDP = only_with("--fsdp")

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
        dropped(
            "--length-bucketing",
            SWITCH,
            "samples keep their step, which follows from the seed; the micro-batches of a step are made of "
            "captions of like length, and cut behind the longest where that changes nothing",
        ),
        dropped("--bucket-pool", a_count(2048), "samples are sorted within a step", idle=_BUCKETS),
        dropped("--bucket-chunk", a_count(128), "samples are sorted within a step", idle=_BUCKETS),
        dropped("--bucket-prefetch-pools", a_count(0), "samples are sorted within a step", idle=_BUCKETS),
        dropped(
            "--text-pad-multiple",
            COUNT,
            "captions are cut behind the longest of a micro-batch, to a multiple of 8",
        ),
    ),
    "Model": (
        dropped(
            "--torchcompile-strategy",
            one_of("task", "model", "task", "step"),
            "the towers' blocks are compiled",
            idle=_COMPILED,
        ),
        dropped("--torchcompile-backend", TEXT, "inductor compiles", idle=_COMPILED),
        dropped("--torchcompile-mode", TEXT, "inductor's default mode compiles", idle=_COMPILED),
    ),
    "Batch, length and optimizer": (
        missing("--opt-kwargs", {"nargs": "*", "default": {}}, "optimizers get no more arguments"),
        refused("--opt-fallback-list", {"type": str, "nargs": "*"}, "only Muon reads it, which is not here"),
        key(
            "--text-layer-decay",
            NUMBER,
            "optim.text_layer_decay",
            optim_flags.layer_decay,
            "The same factor. All that is behind the blocks has the whole learning rate; there, the last "
            "norm has that of the last block.",
        ),
        key(
            "--image-layer-decay",
            NUMBER,
            "optim.image_layer_decay",
            optim_flags.layer_decay,
            "The same; and timm's last layer has the whole rate, which there stands below a projection.",
            also="--visual-layer-decay",
        ),
        key(
            "--wd-exclude",
            TEXTS,
            "optim.no_decay",
            optim_flags.wd_exclude,
            "The same patterns.",
        ),
        missing(
            "--text-pooler-own-group",
            {"action": "store_false", "default": True},
            "the pooler of a text tower goes with its last block",
            idle=only_text_groups,
        ),
    ),
    "Evaluation": (
        dropped("--val-retrieval-chunk-size", a_count(4096), "retrieval is always computed in parts"),
        dropped("--val-retrieval-precision", one_of("fp32", "fp32", "model"), "it is computed in float32"),
    ),
    "Logs": (
        dropped(
            "--log-metric-every-n-steps",
            a_count(10),
            "a line and a record are written together, every `logging.every_steps`",
        ),
        dropped("--train-loss-ema-samples", a_count(50000), "a line has the loss of its own step"),
    ),
    "Ranks": (
        key("--fsdp", SWITCH, "comm.backend", run_flags.fsdp, "`fsdp`."),
        key(
            "--fsdp-no-reshard-after-forward",
            SWITCH,
            "comm.fsdp.reshard_after_forward",
            run_flags.no_reshard,
            "`false`.",
            idle=_FSDP,
        ),
        missing("--fsdp-offload-cpu", SWITCH, "parameters stay on the device", idle=_FSDP),
        dropped(
            "--fsdp-checkpoint",
            one_of("full", "full", "sharded"),
            "a checkpoint is whole, and any number of ranks and each backend go on from it",
            idle=_FSDP,
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
        missing("--force-naflex-vision", SWITCH, "towers stay as they are: name a model with naflex"),
        missing(
            "--naflex-num-train-image-tokens",
            COUNT,
            "an epoch has so many samples: give `--train-num-samples`",
            idle=_NAFLEX,
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
        missing(
            "--naflex-max-text-tokens",
            COUNT,
            "captions have the length of the text tower: see `--force-context-length`",
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
        missing(
            "--naflex-loss-scale",
            one_of("none", "none", "linear", "sqrt"),
            "global batches are all as large, so that the scale would be one number",
            idle=_NAFLEX,
        ),
        dropped("--naflex-pad-multiple", COUNT, "only audio uses it", idle=_NAFLEX),
    ),
    "Audio": (
        refused("--audio-ext", a_text("flac"), _AUDIO, idle=only_audio),
        refused("--pretrained-audio", TEXT, _AUDIO, idle=only_audio),
        refused("--audio-fill", one_of("repeatpad", "pad", "repeat", "repeatpad"), _AUDIO, idle=only_audio),
        refused(
            "--audio-trunc", one_of("rand_trunc", "rand_trunc", "trunc", "fusion"), _AUDIO, idle=only_audio
        ),
        refused("--audio-fusion", SWITCH, _AUDIO, idle=only_audio),
        refused("--audio-int16-normalize", SWITCH, _AUDIO, idle=only_audio),
        refused("--audio-multiprocessing-context", one_of("forkserver", *_STARTS), _AUDIO, idle=only_audio),
        refused("--audio-layer-decay", NUMBER, _AUDIO),
        refused("--audio-zeroshot-dataset", TEXT, _AUDIO),
        refused("--audio-zeroshot-split", a_text("train"), _AUDIO, idle=_ZERO_SHOT),
        refused("--audio-zeroshot-audio-key", a_text("audio"), _AUDIO, idle=_ZERO_SHOT),
        refused("--audio-zeroshot-target-key", a_text("target"), _AUDIO, idle=_ZERO_SHOT),
        refused("--audio-zeroshot-class-key", a_text("category"), _AUDIO, idle=_ZERO_SHOT),
        refused("--audio-zeroshot-template", {"action": "append"}, _AUDIO, idle=_ZERO_SHOT),
        refused("--audio-zeroshot-workers", a_count(0), _AUDIO, idle=_ZERO_SHOT),
        refused(
            "--audio-zeroshot-multiprocessing-context",
            one_of("forkserver", *_STARTS),
            _AUDIO,
            idle=_ZERO_SHOT,
        ),
    ),
}

ADDED = {topic: tuple(replace(flag, release="4") for flag in flags) for topic, flags in _ROWS.items()}
"""Flags of release 4 alone by topic, in the order of the page."""
