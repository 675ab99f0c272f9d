"""The table of open_clip_train's flags: each with our keys, or with the reason why it has none.

It is the truth for the command `clipship from-open-clip` and for docs/from-open-clip.md. The flags are those
of src/open_clip_train/params.py of open_clip_torch's releases (RELEASES in line.py); a test compares them
with the package that is imported.
"""

from collections.abc import Iterator

from trainer.from_open_clip import data_flags, model_flags, optim_flags, run_flags
from trainer.from_open_clip.rows import (
    COUNT,
    NUMBER,
    SWITCH,
    TEXT,
    a_count,
    a_number,
    a_text,
    built_in,
    dropped,
    key,
    missing,
    not_with_horovod,
    one_of,
    only_coca,
    only_distilling,
    only_for_cooldown,
    only_with,
    only_with_ddp,
    refused,
)
from trainer.from_open_clip.table_4 import ADDED, NOT_SUPPORTED
from trainer.from_open_clip.translation import Flag, copy, switch

_GROUPS: dict[str, tuple[Flag, ...]] = {
    "Training data": (
        key(
            "--train-data",
            TEXT,
            "data.train data.transparency",
            data_flags.train_data,
            "Sources between `::` become a list; braces stay. Without data there is nothing to train. "
            "Pictures lose their transparency as in open_clip_train.",
        ),
        key(
            "--train-data-upsampling-factors",
            TEXT,
            "data.weights",
            data_flags.upsampling_factors,
            "Numbers between `::` become a list. There they weigh shards that are drawn at random, here they "
            "say how often an epoch has each sample of a source.",
        ),
        key(
            "--train-num-samples",
            COUNT,
            "optim.steps data.stream_samples data.synthetic_samples",
            data_flags.train_samples,
            "Shards are counted here, so the number only says how long an epoch of open_clip_train was: "
            "see `--epochs`. For streams (`pipe:`) and synthetic data it is the number of samples of an "
            "epoch.",
        ),
        key(
            "--dataset-type",
            one_of("auto", "webdataset", "csv", "synthetic", "auto"),
            "data.format data.caption_lines",
            data_flags.dataset_type,
            "`csv` becomes `table`; `auto` is decided by the ending and written out. With shards the whole "
            "text of a sample is one caption, as in open_clip_train. Audio is refused.",
            from_4={
                "choices": ("webdataset", "webdataset-audio", "csv", "synthetic", "synthetic-audio", "auto")
            },
        ),
        dropped(
            "--dataset-resampled",
            SWITCH,
            "shards are not drawn with replacement: every sample comes once in an epoch, and a resumed run "
            "goes on at the next one",
        ),
        key(
            "--csv-separator",
            a_text("\t"),
            "data.separator",
            data_flags.separator,
            "The default of open_clip_train is a tab, also for .csv. It is one character here.",
        ),
        key("--csv-img-key", a_text("filepath"), "data.image_column", data_flags.for_tables(), "The same."),
        key(
            "--csv-caption-key", a_text("title"), "data.caption_column", data_flags.for_tables(), "The same."
        ),
        key("--workers", a_count(4), "data.workers", copy(), "The same: loader processes of each rank."),
        key("--seed", a_count(0), "seed", copy(), "The same, with other random numbers."),
        key(
            "--aug-cfg",
            {"nargs": "*", "default": {}},
            "data.crop_scale data.augment.crop_ratio data.augment.color_jitter "
            "data.augment.color_jitter_prob data.augment.gray_scale_prob "
            "data.augment.erase_prob data.augment.erase_count",
            data_flags.augmentation,
            "`scale`, `color_jitter`, `color_jitter_prob`, `gray_scale_prob`; with `use_timm` "
            "`scale`, `ratio`, `color_jitter`, `re_prob` and `re_count`, whose noise is uniform here.",
        ),
        key(
            "--image-mean",
            {"type": float, "nargs": "+"},
            "model.image_mean",
            copy(model_flags.channels),
            "The same; one number becomes three.",
        ),
        key(
            "--image-std",
            {"type": float, "nargs": "+"},
            "model.image_std",
            copy(model_flags.channels),
            "The same; one number becomes three.",
        ),
        key(
            "--image-interpolation",
            one_of(None, "bicubic", "bilinear", "random"),
            "model.image_interpolation",
            model_flags.interpolation,
            "The same, for evaluation; training is bicubic in both, but for `use_timm` there, of which "
            "is told. `random` is refused.",
        ),
        key(
            "--image-resize-mode",
            one_of(None, "shortest", "longest", "squash"),
            "model.image_resize_mode",
            copy(),
            "The same, for evaluation.",
        ),
    ),
    "Model": (
        key(
            "--model",
            a_text("RN50"),
            "model.name optim.loss",
            model_flags.model,
            "The same names; `optim.loss` becomes `coca` for CoCa models, as there. Models of audio, and "
            "those that write captions alone (GenLIP), are refused.",
        ),
        key(
            "--pretrained",
            a_text(""),
            "model.pretrained",
            model_flags.pretrained,
            "The same: a tag or a file.",
        ),
        key(
            "--pretrained-image",
            SWITCH,
            "model.init",
            model_flags.pretrained_image,
            'It becomes `"timm"`: the weights that timm has for its image tower. With a tower of open_clip '
            "it has no effect in either.",
        ),
        key("--cache-dir", TEXT, "model.cache_dir", copy(), "The same."),
        key(
            "--precision",
            one_of(
                "amp", "amp", "amp_bf16", "amp_bfloat16", "bf16", "fp16", "pure_bf16", "pure_fp16", "fp32"
            ),
            "model.precision",
            model_flags.precision,
            "`amp` is `fp16`; `amp_bf16` and `amp_bfloat16` are `bf16`; `fp32` is `tf32`. "
            "The others are refused: they keep the weights in half precision, where small updates are lost. "
            "The default is `amp` in release 3.3, `amp_bf16` in 4.",
            from_4={"default": "amp_bf16"},
        ),
        key(
            "--lock-image",
            SWITCH,
            "model.lock_image",
            model_flags.lock_image,
            "The same, and statistics of batch norm are always locked with it.",
        ),
        key(
            "--lock-image-unlocked-groups",
            a_count(0),
            "model.lock_image_unlocked_groups",
            model_flags.with_lock("--lock-image"),
            "The same groups.",
            idle=only_with("--lock-image"),
        ),
        built_in(
            "--lock-image-freeze-bn-stats",
            SWITCH,
            "a locked image tower has locked statistics, too",
            idle=only_with("--lock-image"),
        ),
        key(
            "--lock-text",
            SWITCH,
            "model.lock_text",
            model_flags.lock_text,
            "The same, and layer norms are always locked with it.",
        ),
        key(
            "--lock-text-unlocked-layers",
            a_count(0),
            "model.lock_text_unlocked_layers",
            model_flags.with_lock("--lock-text"),
            "The same layers.",
            idle=only_with("--lock-text"),
        ),
        built_in(
            "--lock-text-freeze-layer-norm",
            SWITCH,
            "a locked text tower has locked layer norms, too",
            idle=only_with("--lock-text"),
        ),
        key("--grad-checkpointing", SWITCH, "model.grad_checkpointing", switch(), "The same."),
        key(
            "--use-bn-sync",
            SWITCH,
            "model.sync_batch_norm",
            copy(),
            "On by default here, so that `false` is written without the flag. It works with Horovod, too. "
            "With `false`, running statistics are the mean over the ranks; open_clip_train keeps rank 0's.",
        ),
        key("--force-context-length", COUNT, "model.context_length", copy(), "The same."),
        key(
            "--force-image-size",
            {"type": int, "nargs": "+"},
            "model.image_size",
            copy(lambda edges: edges[0] if len(edges) == 1 else edges),
            "The same: one edge, or height and width.",
        ),
        key(
            "--force-quick-gelu",
            SWITCH,
            "model.name",
            model_flags.quick_gelu,
            "The variant of the model whose name ends in -quickgelu, if there is one.",
        ),
        key(
            "--force-patch-dropout",
            NUMBER,
            "model.patch_dropout",
            copy(),
            "The same share, drawn for each sample by its place in the run.",
        ),
        missing(
            "--force-custom-text",
            SWITCH,
            "there is no key: give `model.name` a copy of the model's config file with `custom_text`",
        ),
        refused(
            "--torchscript",
            SWITCH,
            "`model.compile` makes steps faster; a scripted model has no other use in training",
            release="3.3",
        ),
        key(
            "--torchcompile",
            SWITCH,
            "model.compile",
            switch(),
            "The towers' blocks are compiled, not the model as a whole.",
        ),
        refused(
            "--trace", SWITCH, "a traced model cannot be trained, and evaluation needs none", release="3.3"
        ),
        refused(
            "--use-bnb-linear", {}, "layers of 8 bits (bitsandbytes) are an experiment in open_clip_train"
        ),
    ),
    "Loss": (
        built_in(
            "--local-loss",
            SWITCH,
            "each rank compares its own samples with those of all ranks; no rank builds the whole matrix",
        ),
        built_in("--gather-with-grad", SWITCH, "gathered features always carry gradients"),
        key(
            "--siglip",
            SWITCH,
            "optim.loss optim.max_logit_scale",
            model_flags.siglip,
            "`siglip`, and the limit of 100 on the logit scale, which is not the default of this loss here.",
        ),
        built_in(
            "--loss-dist-impl", TEXT, "all of its ways give the same loss; here features are gathered once"
        ),
        key(
            "--coca-caption-loss-weight",
            a_number(2.0),
            "optim.caption_weight",
            copy(),
            "Here the mean is over the tokens of all ranks; there, each rank has a mean of its own.",
            idle=only_coca,
        ),
        key(
            "--coca-contrastive-loss-weight",
            a_number(1.0),
            "optim.contrast_weight",
            copy(),
            "The same.",
            idle=only_coca,
        ),
        key(
            "--distill-model",
            {},
            "model.teacher",
            model_flags.teacher,
            "The same, with the clip loss: beside a teacher open_clip_train knows no other.",
            idle=only_distilling,
        ),
        key(
            "--distill-pretrained",
            {},
            "model.teacher_pretrained",
            model_flags.teacher,
            "The same.",
            idle=only_distilling,
        ),
    ),
    "Batch, length and optimizer": (
        key(
            "--batch-size",
            a_count(64),
            "optim.global_batch_size optim.max_batch_size_per_gpu",
            optim_flags.batch_size,
            "In open_clip_train it is the batch of a GPU. The global batch is batch x GPUs x `--accum-freq`, "
            "so the command needs the number of GPUs: `--gpus`.",
        ),
        key(
            "--accum-freq",
            a_count(1),
            "optim.global_batch_size",
            optim_flags.accumulation,
            "Part of the global batch. A GPU that gets more than `optim.max_batch_size_per_gpu` accumulates, "
            "exactly; models with batch norm cannot.",
        ),
        key(
            "--epochs",
            a_count(32),
            "optim.epochs optim.steps",
            optim_flags.epochs,
            "With shards and `--train-num-samples` the exact number of steps in open_clip_train, which is "
            "rounded up for each epoch; else epochs, in which the last samples that fill no batch are left "
            "out.",
        ),
        key("--lr", NUMBER, "optim.lr", optim_flags.learning_rate, "The same peak."),
        key("--beta1", NUMBER, "optim.beta1", copy(), "The same."),
        key(
            "--beta2",
            NUMBER,
            "optim.beta2",
            copy(),
            "The default of open_clip_train is 0.98 for models with vit in the name, 0.999 for others: it is "
            "written out.",
        ),
        key(
            "--eps",
            NUMBER,
            "optim.eps",
            copy(),
            "The default of open_clip_train is 1e-6 for models with vit in the name, 1e-8 for others: it is "
            "written out.",
        ),
        key(
            "--wd",
            a_number(0.2),
            "optim.weight_decay",
            copy(),
            "The same, for the same parameters: `optim.no_decay` names those that release 4 spares besides.",
        ),
        key(
            "--momentum",
            NUMBER,
            "optim.beta1",
            optim_flags.momentum,
            "Of SGD; the other optimizers here have betas.",
            idle=lambda line: "" if "timm" in line["--opt"] else "AdamW has none",
        ),
        key(
            "--warmup",
            a_count(10000),
            "optim.warmup_steps",
            optim_flags.warmup,
            "The same number of steps; open_clip_train's default is 10000, ours is 0. One that is "
            "longer than the training ends with it, at the learning rate that it has reached.",
        ),
        key(
            "--opt",
            a_text("adamw"),
            "optim.optimizer optim.no_decay",
            optim_flags.optimizer,
            "`adamw`, and of timm's optimizers nadamw, adoptw, lion, nesterovw (sgdw) and adafactorbv, if "
            "learning rate and betas are written out. `lamb` and `muon` are used otherwise here, and other "
            "optimizers keep values that a checkpoint could not give back; torch's `nadamw` makes other "
            "steps than timm's.",
        ),
        key(
            "--skip-scheduler",
            SWITCH,
            "optim.schedule optim.warmup_steps",
            switch("constant"),
            "`constant`, and no warm-up.",
        ),
        key(
            "--lr-scheduler",
            a_text("cosine"),
            "optim.schedule",
            optim_flags.scheduler,
            "`cosine` is the default here, too; `const` and `const-cooldown` are `constant`.",
            idle=lambda line: "--skip-scheduler uses none" if line["--skip-scheduler"] else "",
        ),
        key(
            "--epochs-cooldown",
            COUNT,
            "optim.cooldown_share",
            optim_flags.cooldown,
            "The share of the epochs.",
            idle=only_for_cooldown,
        ),
        key("--lr-cooldown-end", a_number(0.0), "optim.min_lr", copy(), "The same.", idle=only_for_cooldown),
        key(
            "--lr-cooldown-power",
            a_number(1.0),
            "optim.cooldown_power",
            copy(),
            "The same.",
            idle=only_for_cooldown,
        ),
        key(
            "--grad-clip-norm",
            NUMBER,
            "optim.grad_clip_norm",
            optim_flags.grad_clip,
            "The same, on the gradient of the whole batch. Without `--gather-with-grad` that of the towers "
            "is smaller in open_clip_train, by the number of GPUs.",
        ),
    ),
    "Evaluation": (
        key(
            "--val-data",
            TEXT,
            "eval.retrieval",
            data_flags.validation,
            "Retrieval in both directions, shared by all ranks. The loss on it is not computed.",
        ),
        dropped("--val-num-samples", COUNT, "all samples are evaluated and counted"),
        key(
            "--val-frequency",
            a_count(1),
            "eval.every_epochs eval.every_steps",
            data_flags.frequency,
            "One frequency for both sets: the epochs that divide both. 0 leaves the set out.",
        ),
        key(
            "--imagenet-val",
            TEXT,
            "eval.zero_shot eval.class_names eval.templates eval.batch_size",
            data_flags.imagenet,
            "The folder, with open_clip's class names and templates written out.",
        ),
        missing(
            "--imagenet-v2",
            TEXT,
            "a run evaluates one set of labelled images; `clipship eval RUN --suite imagenetv2` measures it "
            "afterwards",
        ),
        key(
            "--zeroshot-frequency",
            a_count(2),
            "eval.every_epochs eval.every_steps",
            data_flags.frequency,
            "One frequency for both sets: the epochs that divide both. 0 leaves the set out.",
        ),
    ),
    "Checkpoints": (
        key(
            "--save-frequency",
            a_count(1),
            "checkpoint.every_steps",
            run_flags.save_frequency,
            "The steps of that many epochs, with shards and `--train-num-samples`. Here 3 checkpoints are "
            "kept (`checkpoint.keep`), and one is saved every 30 minutes as well.",
        ),
        built_in("--save-most-recent", SWITCH, "the newest checkpoint is always whole, and resumes the run"),
        key(
            "--resume",
            TEXT,
            "checkpoint.resume",
            run_flags.resume,
            "The same; `latest` is `auto`, the default here. Checkpoints of open_clip_train go on at the "
            "step that their optimizer has counted, with the batch of the params.txt of their run; a file "
            "with weights alone is one for `model.pretrained`.",
        ),
        key("--delete-previous-checkpoint", SWITCH, "checkpoint.keep", switch(1), "One checkpoint is kept."),
        key(
            "--remote-sync",
            TEXT,
            "checkpoint.copy_to",
            run_flags.remote_sync,
            "The same place: PATH/NAME gets each whole checkpoint with the job and the metrics, and keeps as "
            "many as the run folder; logs are not copied. Where theirs takes `--resume latest` from there, "
            "`clipship resume PATH/NAME` does.",
        ),
        dropped(
            "--remote-sync-frequency",
            a_count(300),
            "a checkpoint is copied as soon as it is whole",
            idle=only_with("--remote-sync"),
        ),
        built_in(
            "--remote-sync-protocol",
            {"default": "s3", "choices": ("s3", "fsspec")},
            "the address says how it is reached, and a copy is compared with what was saved",
            idle=only_with("--remote-sync"),
        ),
    ),
    "Logs": (
        key(
            "--logs",
            a_text("./logs/"),
            "logging.runs",
            run_flags.logs,
            "The same; `none` is not wanted, because supervisors and resumed runs need the folder.",
        ),
        built_in("--log-local", SWITCH, "each rank has its own log in the run folder, on every node"),
        key(
            "--name",
            TEXT,
            "name",
            run_flags.run_name,
            "The same. The default of open_clip_train has the date; here it is the model's name, because a "
            "run is resumed by its name.",
        ),
        key(
            "--report-to",
            a_text(""),
            "logging.tensorboard logging.wandb",
            run_flags.report_to,
            "TensorBoard is on by default here, off in open_clip_train; W&B is `online`, trackio "
            "is left out.",
        ),
        dropped("--wandb-notes", a_text(""), "notes belong to W&B's own page of the run"),
        key(
            "--wandb-project-name",
            a_text("open-clip"),
            "logging.wandb_project",
            run_flags.wandb_project,
            "The same.",
            idle=lambda line: "" if "wandb" in line.reports else "it has no effect without W&B",
        ),
        dropped("--debug", SWITCH, "logs have one level; [env] sets what libraries read, such as NCCL_DEBUG"),
        dropped(
            "--copy-codebase",
            SWITCH,
            "an image holds the code, and environment.json of each start says which versions ran",
        ),
        key("--log-every-n-steps", a_count(100), "logging.every_steps", copy(), "The same."),
    ),
    "Ranks": (
        key(
            "--device",
            a_text("cuda"),
            "resources.device resources.nodes resources.gpus_per_node",
            run_flags.device,
            "`cpu` is the same; with `cuda` a rank takes the GPU of its number. A node's ranks follow from "
            "`--gpus`, or from what torchrun is told.",
        ),
        dropped("--dist-url", TEXT, "the launcher says where ranks meet"),
        key(
            "--dist-backend",
            TEXT,
            "comm.torch.device_backend",
            run_flags.dist_backend,
            "`nccl` or `gloo`.",
            idle=not_with_horovod,
        ),
        key(
            "--horovod",
            SWITCH,
            "comm.backend",
            switch("horovod"),
            "`horovod`; every loss, data format and accumulation works with it, too.",
            release="3.3",
        ),
        key(
            "--ddp-static-graph",
            SWITCH,
            "comm.torch.static_graph",
            run_flags.static_graph,
            "The same; it excludes accumulation here.",
            idle=only_with_ddp,
        ),
        built_in("--no-set-device-rank", SWITCH, "a rank that sees a single GPU takes it"),
    ),
}
GROUPS = {topic: _GROUPS.get(topic, ()) + ADDED.get(topic, ()) for topic in (*_GROUPS, *ADDED)}
"""Flags of all releases by topic, in the order of the page, without those of NOT_SUPPORTED."""

FLAGS: dict[str, Flag] = {flag.name: flag for flags in (*GROUPS.values(), NOT_SUPPORTED) for flag in flags}
"""Every flag by its name."""


def flags_of(release: str) -> Iterator[Flag]:
    """Yields the flags that a release has."""
    return (flag for flag in FLAGS.values() if flag.release in ("", release))
