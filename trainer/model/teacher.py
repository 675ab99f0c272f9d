"""A frozen model from whose judgement of pairs the trained one learns, too: distillation.

Both models see the same samples, or the teacher has seen them beforehand (`trainer.data.targets`). Each row
of the student's logits is compared with the softmax of the teacher's row by cross-entropy, in both
directions, and the mean over the global batch is added to the contrastive loss. The letters are those of
`loss.py`, and ranks' shares add up as there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.comm.protocol import Comm
from trainer.config import Job, Precision
from trainer.config.batch_plan import BatchPlan
from trainer.errors import InputError
from trainer.model.build import Clip, build_model
from trainer.model.catalog import check_same_teacher, teacher_of
from trainer.model.loss import Gather
from trainer.model.outputs import features

Judgement = tuple[Tensor, Tensor, Tensor]
"""A teacher's image features [n, D], text features [n, D] and logit scale; its D may be another.

They are of the type of the student's features.
"""


@dataclass(frozen=True)
class Teacher:
    """The frozen model; it draws nothing at random, and no checkpoint has it."""

    model: nn.Module
    precision: Precision

    def __call__(self, images: Tensor, tokens: Tensor) -> Judgement:
        """Returns what the teacher makes of images and tokens, as the student gets them; without a graph."""
        with torch.no_grad():
            image, text, scale, _ = features(self.model, images, tokens, self.precision)
        return image, text, scale


def build_teacher(job: Job, plan: BatchPlan, comm: Comm, student: Clip) -> Teacher | None:
    """Collective: returns the job's teacher on this rank's device, or None if it names none.

    Raises InputError on all ranks alike, also if the two models take other images or captions.
    """
    if job.model.teacher is None:
        return None
    check_same_teacher(job.model)
    own = job.model_copy(update={"model": teacher_of(job.model)})
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
    return Teacher(clip.model.requires_grad_(False).eval(), job.model.precision)


def whole_captions(clip: Clip) -> Clip:
    """Returns the model with captions that are not cut: a teacher may see all of their tokens."""
    return replace(clip, kernels=replace(clip.kernels, caption_length=None, problem=""))


def _length(clip: Clip) -> int:
    """Returns the number of tokens of a caption."""
    return int(clip.tokenizer([""]).shape[1])


def joined(parts: Sequence[Judgement]) -> Judgement:
    """Returns the judgement of several micro-batches as one."""
    return torch.cat([image for image, _, _ in parts]), torch.cat([text for _, text, _ in parts]), parts[0][2]


def distilled_share(
    image_nD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    teacher: Judgement,
    gather: Gather,
    temperature: float | None = None,
) -> Tensor:
    """Returns this rank's share of the cross-entropy with the teacher's rows, a scalar. Collective.

    `temperature` is that of the teacher's softmax; None: its own.
    """
    image_ND, text_ND = gather(image_nD), gather(text_nD)
    own_image, own_text, own_scale = teacher
    own_scale = own_scale if temperature is None else torch.full_like(own_scale, 1 / temperature)
    with torch.no_grad():
        target_image_nN = (own_scale * own_image @ gather(own_text).T).softmax(1)
        target_text_nN = (own_scale * own_text @ gather(own_image).T).softmax(1)
    of_images = F.cross_entropy(scale * image_nD @ text_ND.T, target_image_nN, reduction="sum")
    of_texts = F.cross_entropy(scale * text_nD @ image_ND.T, target_text_nN, reduction="sum")
    return (of_images + of_texts) / (2 * len(image_ND))
