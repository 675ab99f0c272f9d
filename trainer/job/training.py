"""`[model]` and `[optim]`: what is trained, and how."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.job.fields import AboveZero, NonNegative, Positive, Section, Share, Text

Precision = Literal["fp32", "bf16", "fp16", "fp64"]


class Model(Section):
    name: Text = "ViT-B-32"
    """A model that open_clip knows, or the path of a config file (.json) in its format."""
    pretrained: Text | None = None
    """A tag that open_clip knows, a weights file, or a checkpoint of ours to start from."""
    precision: Precision = "fp32"
    """fp32; bf16 autocast; fp16 autocast with a gradient scaler: parameters, features and the loss stay float32. fp64: for proofs."""
    lock_image: bool = False
    """Freeze the image tower, statistics of its batch norm included."""
    lock_text: bool = False
    """Freeze the text tower."""
    sync_batch_norm: bool = True
    """Batch norm statistics over the global batch, so that the gradient does not depend on the number of ranks."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    compile: bool = False
    """Compile the towers' blocks with torch.compile for training: the first step takes a minute or more longer, the others less."""
    channels_last: bool | None = None
    """Memory layout of images and convolutions; None: on for convolutional image towers on a GPU."""
    cache_dir: Text | None = None
    """Where weights and tokenizers are kept; fetched once a node. None: the hub's own default."""
    offline: bool = False
    """Never ask the hub: what is not in the cache is an error."""

    @model_validator(mode="after")
    def _proofs_are_not_compiled(self) -> "Model":
        if self.compile and self.precision == "fp64":  # torch 2.6's compiler fails at attention in float64
            raise ValueError('precision = "fp64" is for proofs, and goes without compile: drop one of the two')
        return self


class Optim(Section):
    global_batch_size: Positive
    """Samples of one optimizer step, over all ranks. Batch per GPU and accumulation follow from the world."""
    max_batch_size_per_gpu: Positive | None = None
    """Samples of one forward pass; a rank's larger share is accumulated (exactly, from cached features)."""
    epochs: Positive | None = None
    """Passes over the data. Give epochs or steps."""
    steps: Positive | None = None
    """Optimizer steps. Give epochs or steps."""
    loss: Literal["clip", "siglip"] = "clip"
    """clip: softmax over the global batch (arXiv 2103.00020); siglip: a sigmoid for each pair (arXiv 2303.15343)."""
    lr: AboveZero = 5e-4
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up; a cosine from lr to min_lr follows."""
    min_lr: NonNegative = 0.0
    weight_decay: NonNegative = 0.2
    """Not applied to gains, biases and the logit scale."""
    beta1: Share = 0.9
    beta2: Share = 0.98
    eps: AboveZero = 1e-6
    grad_clip_norm: AboveZero | None = None
    """Largest norm of the whole gradient, after reduction over the ranks."""

    @model_validator(mode="after")
    def _lengths(self) -> "Optim":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give epochs or steps, one of the two")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is longer than the run of {self.steps} steps")
        return self
