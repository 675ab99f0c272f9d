"""Sets of words for zero-shot classification that have a name.

They are templates, `eval.templates = "set:NAME"`, and class names, `eval.class_names = "set:NAME"`.
"""

from collections.abc import Mapping

from trainer.errors import InputError
from trainer.evaluate.imagenet import imagenet_words

TEMPLATE_SETS: Mapping[str, tuple[str, ...]] = {
    "chinese": (
        "{}",
        "{}的照片",
        "一张{}的照片",
        "一张清晰的{}照片",
        "一张模糊的{}照片",
        "一张明亮的{}照片",
        "一张昏暗的{}照片",
        "一张{}的近照",
        "一张黑白的{}照片",
        "一张{}的特写",
        "一张小小的{}图片",
        "一张很大的{}图片",
        "照片里有{}",
        "图片里是{}",
        "这是{}",
        "这里有一个{}",
        "有人拍下了{}",
        "{}的图画",
        "手绘的{}",
        "一幅{}的素描",
        "一幅画着{}的油画",
        "卡通风格的{}",
        "电脑画出来的{}",
        "手写的{}",
    ),
    "english": (
        "{}",
        "a photo of a {}.",
        "a photo of the {}.",
        "a close-up photo of a {}.",
        "a blurry photo of a {}.",
        "a bright photo of a {}.",
        "a dark photo of a {}.",
        "a black and white photo of a {}.",
        "a drawing of a {}.",
        "a painting of a {}.",
        "a picture that shows a {}.",
    ),
}
"""Sentences with `{}` for the class name, by the set's name."""


IMAGENET = "imagenet"
"""Name of the sets that are open_clip's own words for ImageNet's 1,000 classes."""


def template_set(name: str) -> tuple[str, ...]:
    """Returns the templates of a set. Raises InputError for an unknown name."""
    if name == IMAGENET:
        return tuple(imagenet_words()[1])
    if name not in TEMPLATE_SETS:
        raise _unknown("eval.templates", name, [*TEMPLATE_SETS, IMAGENET])
    return TEMPLATE_SETS[name]


def class_name_set(name: str) -> tuple[str, ...]:
    """Returns the class names of a set, by class number. Raises InputError for an unknown name."""
    if name != IMAGENET:
        raise _unknown("eval.class_names", name, [IMAGENET])
    return tuple(imagenet_words()[0])


def _unknown(key: str, name: str, known: list[str]) -> InputError:
    return InputError(f'{key}: there is no set called "{name}"; there are {", ".join(sorted(known))}')
