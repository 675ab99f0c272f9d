"""`[model]` and `[optim]`: the model, its loss and its optimizer."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainer.config.hubs import check_hub_name, hub_of
from trainer.config.keys import MAY_CHANGE, ON_CUDA, ON_GPUS, JobPath, OnlyIf
from trainer.config.losses import LOSSES, POSITIVES, LossName, PositivesName
from trainer.config.optimizers import OPTIMIZERS, OptimizerName
from trainer.config.types import AboveZero, NonNegative, Positive, Section, Share, Text, one_or_many
from trainer.text.wording import many

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp64"]

Count = Annotated[int, Field(ge=0)]
Decay = Annotated[float, Field(gt=0, le=1)]
Edge = Annotated[int, Field(ge=1, le=4096)]
Tokens = Annotated[int, Field(ge=1, le=16384)]
PatchEdge = Annotated[int, Field(ge=2, le=64)]
Weights = Annotated[tuple[Annotated[float, Field(gt=0, le=1000)], ...], Field(min_length=1)]
Channels = tuple[float, float, float]
PREPROCESSING = {
    "mean": "image_mean",
    "std": "image_std",
    "interpolation": "image_interpolation",
    "resize_mode": "image_resize_mode",
}
"""Keys of [model] that say how images are prepared, by open_clip's names."""

_WITH_CAPTIONS = OnlyIf(lambda job: LOSSES[job.optim.loss].captions, 'optim.loss is not "coca"')
_WITH_TEACHER = OnlyIf(
    lambda job: job.model.judged_by is not None, "there is neither model.teacher nor model.targets"
)
_IF_IMAGE_TRAINS = OnlyIf(
    lambda job: job.model.unlocked[0] != 0, "model.lock_image = true trains nothing of the image tower"
)
_IF_TEXT_TRAINS = OnlyIf(
    lambda job: job.model.unlocked[1] != 0, "model.lock_text = true trains nothing of the text tower"
)
_NOT_DETERMINISTIC = OnlyIf(lambda job: not job.comm.deterministic, "comm.deterministic = true turns it off")
_IF_LR_FALLS = OnlyIf(
    lambda job: job.optim.schedule != "constant" or job.optim.cooldown_share > 0,
    'optim.schedule = "constant" without optim.cooldown_share never falls',
)
_WITH_COOLDOWN = OnlyIf(lambda job: job.optim.cooldown_share > 0, "optim.cooldown_share is 0")
_WITH_INIT = OnlyIf(
    lambda job: job.model.init is not None or bool(job.stage), "there is no model.init, and no [[stage]]"
)
_WITH_LORA = OnlyIf(lambda job: job.model.lora_rank is not None, "model.lora_rank is not set")
_WITH_DECAY = OnlyIf(
    lambda job: job.optim.weight_decay > 0 or job.optim.anchor > 0, "optim.weight_decay = 0 decays nothing"
)
_WITH_EMA = OnlyIf(lambda job: job.optim.ema_decay is not None, "optim.ema_decay is not set")

HUB_TEXT = "hf:"
"""Beginning of a `model.text` that names a model on the Hugging Face hub."""
_WEIGHTS = (".pt", ".pth", ".bin", ".safetensors", ".npz")


def _read_by_optimizer(key: str) -> OnlyIf:
    """Returns the condition of a key that only some optimizers read."""
    return OnlyIf(
        lambda job: key in OPTIMIZERS[job.optim.optimizer].reads,
        'optim.optimizer = "{job.optim.optimizer}" has none',
    )


def is_config_file(name: str) -> bool:
    """Returns whether `model.name` is a config file, and not a model that open_clip knows."""
    return name.endswith(".json")


def is_text_folder(text: str) -> bool:
    """Returns whether `model.text` is a folder, and not a name on a hub."""
    return hub_of(text) is None


def is_init_path(name: str) -> bool:
    """Returns whether `model.init` is a path, and not timm's weights."""
    return name != "timm"


def is_weights(name: str) -> bool:
    """Returns whether `model.pretrained` is a path, and not a tag that open_clip knows or a name on a hub."""
    return hub_of(name) is None and ("/" in name or name.endswith(_WEIGHTS))


class Model(Section):
    """Model that is trained, its precision and which parts of it stay fixed."""

    name: Annotated[Text, JobPath(when=is_config_file)] = "ViT-B-32"
    """A model that open_clip knows, or the path of a config file (.json) in its format."""
    pretrained: Annotated[Text | None, JobPath(when=is_weights)] = None
    """A tag that open_clip knows, a weights file, or a checkpoint or run folder of Clipship to start from;
    RUN/best is the run's best checkpoint. "hf:OWNER/NAME" and "modelscope:OWNER/NAME" are open_clip's weights
    of a model on the Hugging Face hub and on ModelScope, with @REVISION behind it those of a revision."""
    init: Annotated[Text | None, JobPath(when=is_init_path)] = None
    """Weights to begin with that need not fit exactly: a weights file, a checkpoint of Clipship, a run folder
    (its newest checkpoint) or RUN/best, of another resolution, context length or text tower. Positions are
    interpolated; the log lists what is missing.
    "timm": timm's own weights for an image tower of timm (ImageNet, mostly)."""
    init_max_missing: Share = 0.05
    """Largest share of the parameters that `init` may lack; they begin as they would without it."""
    init_keep_positions: Annotated[Count, _WITH_INIT] = 0
    """First positions of captions that keep their place where `init` has fewer than context_length; those
    behind them are stretched over the rest. 20 with 248 tokens: as Long-CLIP does (arXiv 2403.15378). 0: all
    are interpolated."""
    teacher: Annotated[Text | None, JobPath(when=is_config_file)] = None
    """Model from whose judgement of pairs the trained one learns, too (distillation): a model that open_clip
    knows, or the path of a config file. It must take the same images and captions, stays as it is, and is in
    no checkpoint. Each rank has all of it."""
    teacher_pretrained: Annotated[Text | None, JobPath(when=is_weights)] = None
    """Weights of the teacher, as for `pretrained`, but no run folder and no RUN/best: name one of its
    checkpoints. Every start loads them, and a run folder stands for another checkpoint as it grows."""
    targets: Annotated[tuple[Text, ...], JobPath("patterns")] = ()
    """In place of a teacher that judges each batch, what one has stored: a folder of features of the training
    data, as `clipship embed TEACHER SHARDS --out FOLDER` writes them, with a file for each shard. The teacher
    may take other images and captions than the model. Of several folders, each is a teacher, and the mean of
    what they add to the loss counts. A sample without features is a bad one."""
    text: Annotated[Text | None, JobPath("folder", when=is_text_folder)] = None
    """Text tower in place of that of the config, with its tokenizer: "hf:NAME", a model on the Hugging
    Face hub, "modelscope:OWNER/NAME", one on ModelScope, or a folder with its files (config.json, the
    tokenizer, weights). Its weights are where training starts from, unless `pretrained` has others. None: as
    the model's config says."""
    text_pooling: Literal["cls", "mean", "pooler"] | None = None
    """Pooling of the outputs of a Hugging Face text tower. cls: that of the first token; mean: the
    mean over a caption's tokens; pooler: the tower's own layer behind the first token. None: as the model's
    config says; mean with `text`."""
    text_projection: Literal["linear", "mlp", "none"] | None = None
    """Layer from a text tower of Hugging Face to the features' width, which begins with random weights.
    linear: one matrix; mlp: two with a GELU between them; none: the widths must be equal. None: as the
    model's config says; linear with `text`."""
    precision: Precision = "fp32"
    """fp32: all in float32, matrix products too, whose peak rate on an A100 is an eighth of that in TF32;
    tf32: GPUs round the factors of products to 10 bits, all else is float32 (on a CPU it is fp32); bf16:
    autocast; fp16: autocast with a gradient scaler. Parameters, features and the loss stay float32. fp64: for
    numerical proofs only."""
    image_size: Edge | tuple[Edge, Edge] | None = None
    """Edge of the images in pixels, or [height, width]. None: as the model's config says. Weights that were
    trained at another size are fitted: their table of positions is interpolated."""
    image_tokens: Tokens | Annotated[tuple[Tokens, ...], Field(min_length=1)] | None = None
    """Most patches of an image, for a tower that takes images of any shape (NaFlex): each is resized so that
    as many as possible fit, and keeps its ratio of width to height. Of a list, each step draws one for all of
    its images, and evaluation takes the largest. None: as the model's config says (image_seq_len); if that
    says nothing, images have one size, as for other towers."""
    image_tokens_weights: Weights | None = None
    """Weights by which a step draws an entry of image_tokens. None: each is as likely as another."""
    image_patches: Annotated[tuple[PatchEdge, ...], Field(min_length=1)] | None = None
    """Edges of an image's patches in pixels, for such a tower: each step draws one for all of its images. The
    tower's embedding is fitted to it (FlexiViT, arXiv 2212.08013). Evaluation takes the tower's own. None:
    the tower's own alone."""
    image_patches_weights: Weights | None = None
    """Weights by which a step draws an entry of image_patches. None: each is as likely as another."""
    context_length: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Most tokens of a caption. None: as the model's config says. Weights with another length are fitted."""
    patch_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of an image's patches that training leaves out (arXiv 2212.00794): with 0.5 the image tower does
    half of the work. None: as the model's config says."""
    image_mean: Channels | None = None
    """Mean of red, green and blue, from 0 to 1, that is subtracted. None: that of the weights, or of the
    model's config."""
    image_std: Channels | None = None
    """Standard deviation of red, green and blue that pixels are divided by then. None: as for image_mean."""
    image_interpolation: Literal["bicubic", "bilinear"] | None = None
    """Interpolation that resizes an image for evaluation. None: as for image_mean. Training takes bicubic."""
    image_resize_mode: Literal["shortest", "longest", "squash"] | None = None
    """Fit of an image into image_size for evaluation: shortest: crops what is longer; longest: pads what is
    shorter; squash: changes the ratio. None: as for image_mean."""
    lock_image: bool = False
    """Freeze the image tower, including its batch norm statistics."""
    lock_image_unlocked_groups: Count = 0
    """With lock_image: groups of layers at the image tower's end that are trained. The last group of a vision
    transformer is its projection, then each block is one, then all before them."""
    lock_text: bool = False
    """Freeze the text tower."""
    lock_text_unlocked_layers: Count = 0
    """With lock_text: groups of layers at the text tower's end that are trained: the projection, then each
    block, then the embeddings."""
    unlock_after_step: Positive | None = None
    """Step after which what lock_image and lock_text lock is trained, too. The memory and the time of a step
    are those of an unlocked model from the begin. None: it stays locked."""
    lora_rank: Positive | None = None
    """Rank of LoRA's matrices A and B (arXiv 2106.09685), which are trained beside the linear weights of a
    tower's blocks; all else of that tower stays as it is, also what `init` lacks; the logits' scale and bias
    learn. Needs weights to begin with. Checkpoints keep A and B beside the weights; `clipship export` adds
    them up. None: no LoRA."""
    lora_alpha: Annotated[AboveZero | None, _WITH_LORA] = None
    """Factor of LoRA's product B A, divided by the rank. None: the rank, so that the factor is 1."""
    lora_towers: Annotated[Literal["both", "image", "text"], _WITH_LORA] = "both"
    """Towers that LoRA adapts. The other one is trained as a whole, unless it is locked."""
    lora_targets: Annotated[tuple[Text, ...], _WITH_LORA] = ()
    """Patterns of names of the weights that LoRA adapts, such as "*.attn.*" or "*.in_proj_weight". Empty: all
    linear weights of the blocks, in attention and MLP."""
    sync_batch_norm: bool = True
    """Compute batch norm statistics over the global batch, so that the gradient does not depend on the number
    of ranks. False: each rank normalises its own samples alone, and the running statistics, which evaluations
    and checkpoints use, are the mean over the ranks."""
    grad_checkpointing: Annotated[bool, MAY_CHANGE] = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    compile: Annotated[bool, MAY_CHANGE] = False
    """Compile the towers' blocks with torch.compile for training: the first step takes a minute or more
    longer, the others less. Kernels are kept on the node's own disk, for later starts and restarts."""
    cuda_graphs: Annotated[bool, MAY_CHANGE, ON_GPUS, ON_CUDA] = False
    """On a GPU, replay both passes of the towers as CUDA graphs: the host then does a sixth of its work for a
    step, which decides the speed of small batches. The log says if the GPU waits for the host. Needs one
    micro-batch a step, a model without dropout and batch norm, and more memory: one copy of the gradients,
    and the text tower's activations once more. No GPU has run it with packed captions yet."""
    kernels: Annotated[Literal["fast", "plain"], MAY_CHANGE] = "fast"
    """fast: replace attention, layer norms and the handling of captions by forms that compute the same with
    less memory and fewer kernels; the log names them. On a GPU also cut images into patches by a matrix
    product, fuse transformer blocks in Triton in half precision (without `compile`), and fuse the loss in
    tiles, with its products in TF32 under half precision. plain: open_clip's own modules, and nothing of
    that."""
    channels_last: Annotated[bool | None, MAY_CHANGE] = None
    """Use the channels-last memory layout for images and convolutions. None: on for convolutional image
    towers on a GPU."""
    cudnn_benchmark: Annotated[bool | None, MAY_CHANGE, ON_GPUS, ON_CUDA, _NOT_DETERMINISTIC] = None
    """Let cuDNN time its algorithms at the first use of each convolution and take the fastest. None: on for
    convolutional image towers on a GPU. `comm.deterministic` turns it off."""
    cache_dir: Annotated[Text | None, JobPath("folder", made=True), MAY_CHANGE] = None
    """Folder that keeps weights and tokenizers, which are fetched once per node. None: the hub's own default.
    """
    offline: Annotated[bool | None, MAY_CHANGE] = None
    """Never ask the hub: weights and tokenizers that are not in the cache are an error. `clipship fetch` puts
    them there beforehand. None: true if the job has a section of a scheduler: nodes of a cluster often
    reach no hub."""

    @property
    def locked(self) -> tuple[int | None, int | None]:
        """Groups of the image tower and of the text tower, from its end, that are trained from the begin.

        None: all are.
        """
        return (
            self.lock_image_unlocked_groups if self.lock_image else None,
            self.lock_text_unlocked_layers if self.lock_text else None,
        )

    @property
    def unlocked(self) -> tuple[int | None, int | None]:
        """Groups of both towers, from the end, that are trained at some time; None: all are."""
        return self.locked if self.unlock_after_step is None else (None, None)

    @property
    def judged_by(self) -> str | None:
        """The key that names what the model learns from beside its data; None if there is nothing."""
        if self.teacher is not None:
            return "model.teacher"
        return "model.targets" if self.targets else None

    @property
    def lora(self) -> tuple[int, int]:
        """Ranks of LoRA in the image tower and in the text tower; 0: it has none."""
        rank = self.lora_rank or 0
        return rank * (self.lora_towers != "text"), rank * (self.lora_towers != "image")

    @property
    def lora_scale(self) -> float:
        """Factor of LoRA's product B A."""
        return 1.0 if self.lora_alpha is None or self.lora_rank is None else self.lora_alpha / self.lora_rank

    @property
    def tower_changes(self) -> Mapping[str, Mapping[str, Any]]:
        """Values that replace those of the config's two parts, by open_clip's names."""
        changes: dict[str, dict[str, Any]] = {
            "vision_cfg": {"image_size": self.image_size, "patch_dropout": self.patch_dropout},
            "text_cfg": {"context_length": self.context_length},
        }
        return {
            part: {key: value for key, value in own.items() if value is not None}
            for part, own in changes.items()
        }

    @property
    def preprocessing(self) -> Mapping[str, Any]:
        """Values that replace those of the weights' preprocessing, by open_clip's names."""
        changes = {name: getattr(self, key) for name, key in PREPROCESSING.items()}
        return {name: value for name, value in changes.items() if value is not None}

    @property
    def token_budgets(self) -> tuple[int, ...]:
        """Values of image_tokens; none if it is not given."""
        given = self.image_tokens
        return (given,) if isinstance(given, int) else given or ()

    _lists = field_validator("targets", mode="before")(one_or_many)

    @field_validator("image_std")
    @classmethod
    def _divides(cls, value: Channels | None) -> Channels | None:
        if value is not None and not all(0 < each < float("inf") for each in value):
            raise ValueError("must be three numbers above 0")
        return value

    @model_validator(mode="after")
    def _one_beginning(self) -> "Model":
        if self.init is not None and self.pretrained is not None:
            raise ValueError("init and pretrained both say where weights come from: give one of them")
        return self

    @model_validator(mode="after")
    def _weights_of_draws(self) -> "Model":
        for key, drawn in (("image_tokens", self.token_budgets), ("image_patches", self.image_patches or ())):
            weights = getattr(self, f"{key}_weights")
            if weights is not None and len(weights) != len(drawn):
                raise ValueError(
                    f"{key}_weights has {many(len(weights), 'number')} for {many(len(drawn), 'value')} of "
                    f"{key}: give one number for each"
                )
        return self

    @model_validator(mode="after")
    def _a_teacher_has_weights(self) -> "Model":
        if (self.teacher is None) != (self.teacher_pretrained is None):
            raise ValueError(
                "teacher and teacher_pretrained belong together: the model to learn from, and its weights"
            )
        if self.teacher is not None and self.targets:
            raise ValueError(
                "teacher judges each batch, and targets are what teachers have stored: give one of the two"
            )
        return self

    @model_validator(mode="after")
    def _a_name_on_the_hub(self) -> "Model":
        for name in (self.text, self.pretrained, self.teacher_pretrained):
            check_hub_name(name)
        return self

    @model_validator(mode="after")
    def _unlocked_are_locked(self) -> "Model":
        for unlocked, lock in (
            ("lock_image_unlocked_groups", "lock_image"),
            ("lock_text_unlocked_layers", "lock_text"),
        ):
            if getattr(self, unlocked) and not getattr(self, lock):
                raise ValueError(f"{unlocked} leaves a part of a locked tower open: set {lock} = true, too")
        if self.unlock_after_step is not None and not (self.lock_image or self.lock_text):
            raise ValueError("unlock_after_step unlocks nothing: set lock_image or lock_text = true, too")
        return self

    @model_validator(mode="after")
    def _lora_has_fixed_weights(self) -> "Model":
        if not self.lora_rank:
            return self
        if not (self.pretrained or self.init or ":" in self.name):
            raise ValueError(
                "lora_rank trains beside weights that stay as they are, and these would be random: give "
                "pretrained or init, too"
            )
        if self.init == "timm" and self.lora[1]:
            raise ValueError(
                'init = "timm" has weights for the image tower alone, and lora_rank would leave the text '
                'tower as it begins: set lora_towers = "image"'
            )
        for tower, rank, lock in zip(("text", "image"), self.lora, ("lock_image", "lock_text"), strict=True):
            if rank and getattr(self, lock):
                raise ValueError(
                    f"{lock} = true and lora_rank both say what learns of one tower: remove {lock}, or set "
                    f'lora_towers = "{tower}"'
                )
        return self

    @model_validator(mode="after")
    def _whole_passes_are_captured(self) -> "Model":
        for other in ("compile", "grad_checkpointing"):
            if self.cuda_graphs and getattr(self, other):
                raise ValueError(f"cuda_graphs = true excludes {other} = true: remove one of the two")
        return self

    @model_validator(mode="after")
    def _proofs_are_not_compiled(self) -> "Model":
        if self.compile and self.precision == "fp64":  # torch 2.6's compiler fails at attention in float64
            raise ValueError(
                'precision = "fp64" is for numerical proofs and cannot be compiled: remove one of the two'
            )
        return self


class Optim(Section):
    """Length of the training, batch, loss and optimizer."""

    global_batch_size: Positive
    """Samples in one optimizer step, over all ranks. Batch per GPU and accumulation follow from the world
    size."""
    max_batch_size_per_gpu: Annotated[Positive | Literal["auto"] | None, MAY_CHANGE] = None
    """Most samples in one forward pass; a rank's larger share is accumulated (exactly, from cached features).
    "auto": as many as fit the GPU by the arithmetic of `clipship check`; on CPUs no limit. None: no limit."""
    max_image_tokens_per_gpu: Annotated[Positive | None, MAY_CHANGE] = None
    """Most patches of images in one forward pass, with model.image_tokens: a step that has drawn fewer for
    each image passes in fewer parts, with the same gradient. None: as max_batch_size_per_gpu says."""
    epochs: Positive | None = None
    """Passes over the data. Give either epochs or steps."""
    steps: Positive | None = None
    """Optimizer steps. Give either epochs or steps."""
    loss: LossName = "clip"
    """clip: softmax over the global batch (arXiv 2103.00020); siglip: a sigmoid for each pair (arXiv
    2303.15343); coca: clip, and the model learns to write the captions, which takes one of open_clip's CoCa
    models (arXiv 2205.01917)."""
    positives: PositivesName = "pairs"
    """pairs: an image and its own caption belong together, and all other pairs of a step do not. The others
    make all samples of a group positives of each other: clip spreads the target evenly over their captions
    (UniCL, arXiv 2204.03610), and for siglip their pairs are matches. captions: equal ones, for data that
    repeats them (products, names of classes), if their tokens are, as the model gets them. images: equal
    ones, for data with a row for each caption of a picture, if the bytes of their files are. groups: samples
    with the same id in data.group_by. Not for coca."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the softmax's target that goes to all samples of the global batch alike, the rest to the
    sample's own pair. For the losses clip and coca."""
    contrast_weight: Annotated[NonNegative, _WITH_CAPTIONS] = 1.0
    """Factor of the contrastive part of the coca loss."""
    distill_weight: Annotated[NonNegative, _WITH_TEACHER] = 1.0
    """Factor of what is added to the loss with `model.teacher` or `model.targets`: for clip the cross-entropy
    of the model's rows of logits with those of the teacher, after the softmax; for siglip that of each pair's
    sigmoid with the teacher's, which then needs a logit bias, as SigLIP has one."""
    distill_temperature: Annotated[AboveZero | None, _WITH_TEACHER] = None
    """Temperature of the teacher's softmax, by which its cosines are divided (arXiv 2311.17049). Higher: the
    model learns more of what the teacher finds alike, and less of the one pair that it finds best. For
    siglip the bias changes in proportion, so that the teacher has even odds at the same cosine. None: the
    teacher's own, 0.01 for most models."""
    caption_weight: Annotated[NonNegative, _WITH_CAPTIONS] = 2.0
    """Factor of the other part: the cross-entropy of each token of a caption with what the model would write
    there, as the mean over the tokens of the global batch; padding is left out."""
    lr: AboveZero = 5e-4
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up; `schedule` says what follows."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Curve of the learning rate after the warm-up. cosine, linear: from lr to min_lr at the last step;
    constant: lr until the cooldown."""
    min_lr: Annotated[NonNegative, _IF_LR_FALLS] = 0.0
    """Learning rate at the end of the cosine, the line or the cooldown."""
    cooldown_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of all steps, at the end, in which a constant learning rate falls to min_lr (warm-up, stable,
    decay). `--longer` moves the cooldown to the new end."""
    cooldown_power: Annotated[AboveZero, _WITH_COOLDOWN] = 1.0
    """Exponent of the cooldown: with 1 it is a line; below 1 it falls late, above 1 early."""
    decay_from_step: Positive | None = None
    """Steps after which the learning rate leaves its schedule and falls from decay_from_lr to min_lr at the
    last step, in the shape of cooldown_power. `--shorter` sets both. None: the schedule holds to the end."""
    decay_from_lr: AboveZero | None = None
    """Learning rate at which that decay begins. An earlier step after the warm-up, which comes again if the
    checkpoint of decay_from_step is broken, has it, too."""
    image_lr: Annotated[AboveZero | None, _IF_IMAGE_TRAINS] = None
    """Peak learning rate of the image tower, whose curve is scaled by it. None: lr."""
    text_lr: Annotated[AboveZero | None, _IF_TEXT_TRAINS] = None
    """Peak learning rate of the text tower, and of all that is neither the image tower's nor the logits'.
    None: lr."""
    image_layer_decay: Annotated[Decay, _IF_IMAGE_TRAINS] = 1.0
    """Factor by which the learning rate of each layer of the image tower is smaller than that of the next
    one: 0.75 gives the last layer all of it, and the embeddings of a tower of 12 blocks 0.75^13 (arXiv
    2106.08254, appendix). 1: the same for all."""
    text_layer_decay: Annotated[Decay, _IF_TEXT_TRAINS] = 1.0
    """The same for the text tower. CoCa's decoder, which comes behind it, has all of its learning rate."""
    optimizer: OptimizerName = "adamw"
    """adamw: torch's fused kernel. The others are timm's. nadamw, adopt: variants of Adam; lion: takes a
    tenth of AdamW's lr and 3 to 10 times its weight decay; sgd: Nesterov's momentum, decoupled decay;
    adafactor: big_vision's form, with half of AdamW's memory; lamb: updates in proportion to the weights of
    each parameter, for large batches; muon: orthogonal updates of matrices, as large as AdamW's, with half of
    its memory, and AdamW for tables of embeddings and biases, the matrix by which CoCa's decoder chooses
    words, convolutions and vectors. On a GPU the host waits once in a step of timm's."""
    weight_decay: NonNegative = 0.2
    """Weight decay, decoupled from the gradient. It is not applied to gains, biases and the logit scale."""
    no_decay: Annotated[tuple[Text, ...], _WITH_DECAY] = ()
    """Patterns of names of more parameters without weight decay and anchor, such as "*positional_embedding"
    or "visual.class_embedding"."""
    anchor: NonNegative = 0.0
    """Pull to the weights that the run began with (L2-SP, arXiv 1802.01483), in place of weight decay's pull
    to zero, or beside it: after each update a weight w moves by -lr * anchor * (w - its first value). It acts
    where weight decay does, also if that is 0. Needs model.init or model.pretrained, which each start reads
    again; what model.init lacks is held at its random begin. The first weights take a GPU as much memory as
    the trained ones. 0: none."""
    beta1: Annotated[Share, _read_by_optimizer("beta1")] = 0.9
    """Decay rate of the running mean of gradients: momentum. Muon is often given 0.95."""
    beta2: Annotated[Share, _read_by_optimizer("beta2")] = 0.98
    """Decay rate of the running mean of squared gradients; for adafactor, the largest one; for lion, that of
    its momentum."""
    eps: Annotated[AboveZero, _read_by_optimizer("eps")] = 1e-6
    """Term that keeps the division by the root of squared gradients finite."""
    grad_clip_norm: AboveZero | None = None
    """Largest norm of the whole gradient, after reduction over the ranks."""
    max_logit_scale: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Largest factor that similarities are multiplied by (the inverse of the temperature); the smallest is
    then 1. None: 100 for clip and coca (arXiv 2103.00020, section 2.5), and no limits for siglip, whose
    released weights exceed 100."""

    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average (EMA) of the weights: with 0.9999 it reaches back some 10,000
    steps. Checkpoints have it in a file of its own, `ema.pt`, and evaluations measure it, too: their metrics
    begin with ema_. None: none is kept."""
    ema_from_step: Annotated[int, Field(ge=0), _WITH_EMA] = 0
    """Step until which the EMA is the weights themselves."""

    @property
    def labelled(self) -> bool:
        """True if samples may be positives of each other, so that any pair may be."""
        return self.positives != "pairs"

    @property
    def loss_text(self) -> str:
        """The loss for people."""
        return f"{self.loss} loss{POSITIVES[self.positives]}"

    @property
    def logit_scale_limit(self) -> float | None:
        """The logit scale's limit: `max_logit_scale`, or the value in the loss's paper; None for no limit."""
        return self.max_logit_scale or LOSSES[self.loss].logit_scale_limit

    def state_values(self, parameters: int, others: int | None = None) -> int:
        """Returns the values kept besides so many trained parameters: the optimizer's, and the EMA.

        `others` are those of the parameters that are no matrices of layers; None: all may be such.
        """
        kept = OPTIMIZERS[self.optimizer].kept(parameters, parameters if others is None else others)
        return kept + parameters * (self.ema_decay is not None)

    def step_values(self, parameters: int, others: int | None = None) -> int:
        """Returns those of `state_values` and the first weights of the anchor, which no checkpoint has."""
        return self.state_values(parameters, others) + parameters * (self.anchor > 0)

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> "Optim":
        if self.optimizer == "sgd" and not self.beta1:
            raise ValueError(
                "beta1 = 0 leaves sgd no momentum, and Nesterov's form needs some: set beta1, such as 0.9"
            )
        return self

    @model_validator(mode="after")
    def _lengths(self) -> "Optim":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}")
        if self.label_smoothing and LOSSES[self.loss].contrast == "siglip":
            raise ValueError(
                "label_smoothing changes the target of a softmax, and the siglip loss has none: remove it"
            )
        if self.labelled and LOSSES[self.loss].captions:
            raise ValueError(
                f'positives = "{self.positives}" is for the losses clip and siglip, and not for {self.loss}: '
                "choose one of them, or leave it out"
            )
        if self.cooldown_share and self.schedule != "constant":
            raise ValueError(
                f'cooldown_share belongs to schedule = "constant": a {self.schedule} decay has no cooldown'
            )
        if (self.decay_from_step is None) != (self.decay_from_lr is None):
            raise ValueError("decay_from_step and decay_from_lr belong together: set both or none")
        return self
