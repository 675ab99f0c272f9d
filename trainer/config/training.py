"""`[model]` and `[optim]`: the model, its loss and its optimizer."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config.keys import MAY_CHANGE, JobPath
from trainer.config.types import AboveZero, NonNegative, Positive, Section, Share, Text

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp64"]

_WEIGHTS = (".pt", ".pth", ".bin", ".safetensors", ".npz")


def is_config_file(name: str) -> bool:
    """Returns whether `model.name` is a config file, and not a model that open_clip knows."""
    return name.endswith(".json")


def is_weights(name: str) -> bool:
    """Returns whether `model.pretrained` is a path, and not a tag that open_clip knows."""
    return "/" in name or name.endswith(_WEIGHTS)


class Model(Section):
    """Model that is trained, its precision and which parts of it stay fixed."""

    name: Annotated[Text, JobPath(when=is_config_file)] = "ViT-B-32"
    """A model that open_clip knows, or the path of a config file (.json) in its format."""
    pretrained: Annotated[Text | None, JobPath(when=is_weights)] = None
    """A tag that open_clip knows, a weights file, or a checkpoint of Clipship to start from."""
    precision: Precision = "fp32"
    """fp32: all in float32, matrix products too, whose peak rate on an A100 is an eighth of that in TF32;
    tf32: GPUs round the factors of products to 10 bits, all else is float32 (on a CPU it is fp32); bf16:
    autocast; fp16: autocast with a gradient scaler. Parameters, features and the loss stay float32. fp64: for
    numerical proofs only."""
    lock_image: bool = False
    """Freeze the image tower, including its batch norm statistics."""
    lock_text: bool = False
    """Freeze the text tower."""
    sync_batch_norm: bool = True
    """Compute batch norm statistics over the global batch, so that the gradient does not depend on the number
    of ranks."""
    grad_checkpointing: Annotated[bool, MAY_CHANGE] = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    compile: Annotated[bool, MAY_CHANGE] = False
    """Compile the towers' blocks with torch.compile for training: the first step takes a minute or more
    longer, the others less."""
    kernels: Annotated[Literal["fast", "plain"], MAY_CHANGE] = "fast"
    """fast: replace attention, layer norms and the handling of captions by forms that compute the same with
    less memory and fewer kernels; the log names them. plain: open_clip's own modules."""
    channels_last: Annotated[bool | None, MAY_CHANGE] = None
    """Use the channels-last memory layout for images and convolutions. None: on for convolutional image
    towers on a GPU."""
    cudnn_benchmark: Annotated[bool | None, MAY_CHANGE] = None
    """Let cuDNN time its algorithms at the first use of each convolution and take the fastest. None: on for
    convolutional image towers on a GPU. `comm.deterministic` turns it off."""
    cache_dir: Annotated[Text | None, JobPath("folder", made=True), MAY_CHANGE] = None
    """Folder that keeps weights and tokenizers, which are fetched once per node. None: the hub's own default.
    """
    offline: Annotated[bool, MAY_CHANGE] = False
    """Never ask the hub: weights and tokenizers that are not in the cache are an error."""

    @model_validator(mode="after")
    def _proofs_are_not_compiled(self) -> "Model":
        if self.compile and self.precision == "fp64":  # torch 2.6's compiler fails at attention in float64
            raise ValueError(
                'precision = "fp64" is for numerical proofs and cannot be compiled: remove one of the two'
            )
        return self


class Optim(Section):
    """Length of the training, batch, loss and optimizer (AdamW)."""

    global_batch_size: Positive
    """Samples in one optimizer step, over all ranks. Batch per GPU and accumulation follow from the world
    size."""
    max_batch_size_per_gpu: Annotated[Positive | Literal["auto"] | None, MAY_CHANGE] = None
    """Most samples in one forward pass; a rank's larger share is accumulated (exactly, from cached features).
    "auto": as many as fit the GPU by the arithmetic of `clipship check`; on CPUs no limit. None: no limit."""
    epochs: Positive | None = None
    """Passes over the data. Give either epochs or steps."""
    steps: Positive | None = None
    """Optimizer steps. Give either epochs or steps."""
    loss: Literal["clip", "siglip"] = "clip"
    """clip: softmax over the global batch (arXiv 2103.00020); siglip: a sigmoid for each pair (arXiv
    2303.15343)."""
    loss_tile: Annotated[Annotated[int, Field(ge=0)] | None, MAY_CHANGE] = None
    """Rows and columns of the blocks in which the loss computes its logits; the result is the same, in less
    memory. 0: all logits at once. None: blocks of 2,048 where all at once would take more than a tenth of the
    GPU's memory, otherwise 0. With n samples on a rank and N in the batch, all at once take 16 n N bytes."""
    lr: AboveZero = 5e-4
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up; `schedule` says what follows."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Curve of the learning rate after the warm-up. cosine, linear: from lr to min_lr at the last step;
    constant: lr until the cooldown."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of the cosine, the line or the cooldown."""
    cooldown_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of all steps, at the end, in which a constant learning rate falls to min_lr (warm-up, stable,
    decay). `--longer` moves the cooldown to the new end."""
    cooldown_power: AboveZero = 1.0
    """Exponent of the cooldown: with 1 it is a line; below 1 it falls late, above 1 early."""
    weight_decay: NonNegative = 0.2
    """Weight decay of AdamW. It is not applied to gains, biases and the logit scale."""
    beta1: Share = 0.9
    """AdamW's decay rate of the running mean of gradients."""
    beta2: Share = 0.98
    """AdamW's decay rate of the running mean of squared gradients."""
    eps: AboveZero = 1e-6
    """AdamW's term that keeps the division by the root of squared gradients finite."""
    grad_clip_norm: AboveZero | None = None
    """Largest norm of the whole gradient, after reduction over the ranks."""
    max_logit_scale: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Largest factor that similarities are multiplied by (the inverse of the temperature); the smallest is
    then 1. None: 100 for the clip loss (arXiv 2103.00020, section 2.5), and no limits for siglip, whose
    released weights exceed 100."""

    @property
    def logit_scale_limit(self) -> float | None:
        """The logit scale's limit: `max_logit_scale`, or the value in the loss's paper; None for no limit."""
        return self.max_logit_scale or (100.0 if self.loss == "clip" else None)

    @model_validator(mode="after")
    def _lengths(self) -> "Optim":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is longer than the run of {self.steps} steps")
        if self.cooldown_share and self.schedule != "constant":
            raise ValueError(
                f'cooldown_share belongs to schedule = "constant": a {self.schedule} decay has no cooldown'
            )
        return self
