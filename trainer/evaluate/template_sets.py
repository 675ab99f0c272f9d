"""Sets of words for zero-shot classification that have a name.

They are templates, `eval.templates = "set:NAME"`, and class names, `eval.class_names = "set:NAME"`.
"""

from trainer.errors import InputError
from trainer.evaluate.imagenet import imagenet_words
from trainer.sysinfo.own_table import own_table

IMAGENET = "imagenet"
"""Name of the sets that are open_clip's own words for ImageNet's 1,000 classes."""


def template_set(name: str) -> tuple[str, ...]:
    """Returns the templates of a set. Raises InputError for an unknown name."""
    if name == IMAGENET:
        return tuple(imagenet_words()[1])
    sets = own_table(__file__, "template_sets.toml")
    if name not in sets:
        raise _unknown("eval.templates", name, [*sets, IMAGENET])
    return tuple(sets[name])


def class_name_set(name: str) -> tuple[str, ...]:
    """Returns the class names of a set, by class number. Raises InputError for an unknown name."""
    if name != IMAGENET:
        raise _unknown("eval.class_names", name, [IMAGENET])
    return tuple(imagenet_words()[0])


def _unknown(key: str, name: str, known: list[str]) -> InputError:
    return InputError(f'{key}: there is no set called "{name}"; there are {", ".join(sorted(known))}')
