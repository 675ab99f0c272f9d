"""`[stack]` and `[image]`: the container that ranks run in."""

import re

from pydantic import field_validator

from trainer.job.fields import Section, Text

_IMAGE_NAME = re.compile(r"([\w.-]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?", re.ASCII)


class Stack(Section):
    """Versions that the container image is built from. Rendering the image comes in a later release."""

    torch: Text = "2.14.1"
    """PyTorch's version; CUDA, NCCL and Horovod follow from it."""


class Image(Section):
    """The container image that a cluster runs."""

    tag: Text | None = None
    """Its full name, as `docker pull` takes it. None: the job runs without a container."""

    @field_validator("tag")
    @classmethod
    def _a_reference(cls, value: str | None) -> str | None:
        if value is not None and not _IMAGE_NAME.fullmatch(value):
            raise ValueError(f'"{value}" is no image name; expected [registry/]name[:tag], the name in lower case')
        return value
