"""`[eval.suite]`: public data sets and own folders, on which `clipship eval` measures a model."""

from typing import Annotated

from pydantic import field_validator

from trainer.config.keys import JobPath
from trainer.config.types import Section, Text


class Suite(Section):
    """A suite of data sets that `clipship eval` measures a model on. A run itself does not."""

    names: tuple[Text, ...] = ()
    """Suites (datacomp, vtab, imagenet, retrieval, own) and single data sets of them, such as
    "vtab/pets"; empty: none. `clipship eval --suite NAME` replaces them."""
    root: Annotated[Text | None, JobPath("folder", ranks=False)] = None
    """Folder with the public data sets, each in its own folder, such as wds_imagenet1k_test, as
    CLIP_benchmark and DataComp lay them out. Nothing is downloaded; `clipship check` says which ones are
    there."""
    folders: Annotated[tuple[Text, ...], JobPath("folder", ranks=False)] = ()
    """Folders of own data sets, which the name "own" stands for. Each is laid out like a public one, or holds
    a folder of images for each class."""

    @field_validator("names", "folders", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value
