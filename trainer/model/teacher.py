"""A frozen model from whose judgement of pairs the trained one learns, too: distillation.

Both models see the same samples, or the teacher has seen them beforehand (`trainer.data.targets`). For clip,
each row of the student's logits is compared with the softmax of the teacher's row by cross-entropy, in both
directions; for siglip, the sigmoid of each pair with the teacher's. The mean over the global batch is added
to the contrastive loss. The letters are those of `loss.py`, and ranks' shares add up as there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.comm.protocol import Comm
from trainer.config import Job, Precision
from trainer.config.batch_plan import BatchPlan
from trainer.config.losses import NO_BIAS
from trainer.errors import InputError
from trainer.model.build import Clip, build_model
from trainer.model.catalog import check_same_teacher, teacher_of
from trainer.model.loading import check_weights, pretrained_file
from trainer.model.loss import Gather, needed_bias
from trainer.model.outputs import features


class Judgement(NamedTuple):
    """Judgement of a teacher on samples, of the type of the student's features; its D may be another."""

    image: Tensor
    """Features of the images, [n, D]."""
    text: Tensor
    scale: Tensor
    """Scalar: the factor of its cosines."""
    bias: Tensor | None = None
    """Scalar that is added then; None: nothing is."""

    def at(self, temperature: float | None) -> tuple[Tensor, Tensor | None]:
        """Returns scale and bias at another temperature, with even odds at the same cosine; None: its own."""
        if temperature is None:
            return self.scale, self.bias
        scale = torch.full_like(self.scale, 1 / temperature)
        return scale, None if self.bias is None else self.bias * scale / self.scale


@dataclass(frozen=True)
class Teacher:
    """The frozen model; it draws nothing at random, and no checkpoint has it."""

    model: nn.Module
    precision: Precision

    def __call__(self, images: Tensor, tokens: Tensor) -> Judgement:
        """Returns what the teacher makes of images and tokens, as the student gets them; without a graph."""
        with torch.no_grad():
            return Judgement(*features(self.model, images, tokens, self.precision))


def build_teacher(job: Job, plan: BatchPlan, comm: Comm, student: Clip) -> Teacher | None:
    """Collective: returns the job's teacher on this rank's device, or None if it names none.

    Raises InputError on all ranks alike, also if the two models take other images or captions.
    """
    if job.model.teacher is None:
        return None
    check_same_teacher(job.model)
    own = job.model_copy(update={"model": teacher_of(job.model)})
    loss = "siglip" if check_weights(pretrained_file(own)) else "clip"
    own = own.model_copy(update={"optim": job.optim.model_copy(update={"loss": loss})})
    # It is never in training mode: no statistics are computed, of one micro-batch or of several.
    clip = build_model(own, replace(plan, accumulation=1), comm)
    for what, one, other in (
        ("images of another size", clip.images.size, student.images.size),
        ("other means and deviations of pixels", (clip.mean, clip.std), (student.mean, student.std)),
        ("captions of another length", _length(clip), _length(student)),
    ):
        if one != other:
            raise InputError(
                f"model.teacher: {job.model.teacher} takes {what} than {job.model.name} ({one}, not "
                f"{other}): the two must take the same samples"
            )
    if job.optim.loss == "siglip" and getattr(clip.model, "logit_bias", None) is None:
        raise InputError(f"model.teacher: {job.model.teacher} {NO_BIAS}")
    return Teacher(clip.model.requires_grad_(False).eval(), job.model.precision)


def whole_captions(clip: Clip) -> Clip:
    """Returns the model with captions that are not cut: a teacher may see all of their tokens."""
    return replace(clip, kernels=replace(clip.kernels, caption_length=None, problem=""))


def _length(clip: Clip) -> int:
    """Returns the number of tokens of a caption."""
    return int(clip.tokenizer([""]).shape[1])


def joined(parts: Sequence[Judgement]) -> Judgement:
    """Returns the judgement of several micro-batches as one."""
    image, text = torch.cat([part.image for part in parts]), torch.cat([part.text for part in parts])
    return Judgement(image, text, parts[0].scale, parts[0].bias)


Distilled = Callable[[Tensor, Tensor, Tensor, Tensor | None, Judgement, Gather, float | None], Tensor]


def clip_distilled(
    image_nD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    _bias: Tensor | None,
    teacher: Judgement,
    gather: Gather,
    temperature: float | None = None,
) -> Tensor:
    """Returns this rank's share of the cross-entropy with the teacher's rows, a scalar. Collective.

    `temperature` is that of the teacher's softmax, to which no bias matters; None: its own.
    """
    image_ND, text_ND = gather(image_nD), gather(text_nD)
    own_scale, _ = teacher.at(temperature)
    with torch.no_grad():
        target_image_nN = (own_scale * teacher.image @ gather(teacher.text).T).softmax(1)
        target_text_nN = (own_scale * teacher.text @ gather(teacher.image).T).softmax(1)
    of_images = F.cross_entropy(scale * image_nD @ text_ND.T, target_image_nN, reduction="sum")
    of_texts = F.cross_entropy(scale * text_nD @ image_ND.T, target_text_nN, reduction="sum")
    return (of_images + of_texts) / (2 * len(image_ND))


def siglip_distilled(
    image_nD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    teacher: Judgement,
    gather: Gather,
    temperature: float | None = None,
) -> Tensor:
    """Returns this rank's share of the cross-entropy of all pairs with the teacher's sigmoids, a scalar.

    It is summed over pairs and averaged over images, as the sigmoid loss is. Raises ValueError if one of the
    two models has no logit bias. Collective.
    """
    own_scale, own_bias = teacher.at(temperature)
    with torch.no_grad():
        target_nN = (own_scale * teacher.image @ gather(teacher.text).T + needed_bias(own_bias)).sigmoid()
    text_ND = gather(text_nD)
    logits_nN = scale * image_nD @ text_ND.T + needed_bias(bias)
    return F.binary_cross_entropy_with_logits(logits_nN, target_nN, reduction="sum") / len(text_ND)


DISTILLED: dict[str, Distilled] = {"clip": clip_distilled, "siglip": siglip_distilled}
