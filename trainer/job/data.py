"""`[data]`: what is trained on, and in what order. No file is touched."""

from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from trainer.job.fields import STANDARD_INPUT, Positive, Section, Text, is_stream


class Data(Section):
    train: tuple[Text, ...] = ()
    """Shards (`data/{0000..0099}.tar`, braces, globs and lists) or tables (.csv, .tsv). Only format = "synthetic" needs none.
    Streams (`pipe:COMMAND`, or `-` for standard input, once and by one rank) are read too, with fewer promises on order and resume."""
    format: Literal["auto", "webdataset", "table", "synthetic"] = "auto"
    """auto: from the names' endings."""
    image_key: tuple[Text, ...] = ("jpg", "jpeg", "png", "webp")
    """Shards: endings of the member that holds the image; the first that a sample has."""
    caption_key: Text = "txt"
    """Shards: ending of the member that holds the captions, one a line; one is drawn for each epoch."""
    image_column: Text = "image"
    """Tables: column with the image file's path, relative to the table."""
    caption_column: Text = "caption"
    separator: Annotated[str, StringConstraints(min_length=1, max_length=1)] | None = None
    """Tables: None takes a comma for .csv and a tab for .tsv."""
    shuffle_window: Positive = 10_000
    """Samples: how far shuffling carries one within an epoch's sequence, after the shards themselves are shuffled."""
    crop_scale: tuple[float, float] = (0.9, 1.0)
    """Smallest and largest share of the image's area that the random crop of training keeps."""
    workers: Annotated[int, Field(ge=0, le=256)] = 2
    """Loader processes per rank; 0 loads in the rank itself."""
    stream_samples: Positive | None = None
    """Samples of an epoch, over all ranks, where `train` names streams (`pipe:COMMAND`, `-`), which nobody can count beforehand."""
    index: Text | None = None
    """Shards: folder of the index that says where each sample lies; every rank reads it, and it is made where it is missing.
    None: .clipship-index beside the first shard, or in the run folder where nobody may write there."""
    weights: tuple[Annotated[float, Field(gt=0, le=1000)], ...] | None = None
    """One for each entry of `train`: how often an epoch has its samples. 1 once, 2 twice; 0.5 one half, and the next epoch the other."""
    on_bad_sample: Literal["skip", "fail"] = "skip"
    """A sample that cannot be decoded: another takes its place and it is counted and named, or the run ends. What the shards' headers show
    is left out at the start, or the run does not begin: samples without image or caption, what stands behind damage."""
    max_bad_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """With skip: the run ends where a larger share of the samples is bad: at the start, what the shards' headers show, a damaged
    shard's loss judged by the samples of the others; then what a rank meets. 10 bad samples of less than 1,000 are no reason to end."""
    max_image_pixels: Positive = 50_000_000
    """An image of more is a bad sample: it is not decoded. 50 million take 150 MB."""
    synthetic_samples: Positive = 1024
    """Samples of an epoch with format = "synthetic"."""

    @field_validator("train", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("crop_scale")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1] <= 1:
            raise ValueError("must be two numbers, 0 < smallest <= largest <= 1")
        return value

    @model_validator(mode="after")
    def _named(self) -> "Data":
        if not self.train and self.format != "synthetic":
            raise ValueError('train names no shard and no table; only format = "synthetic" needs none')
        if self.weights is not None and len(self.weights) != len(self.train):
            raise ValueError(f"weights has {len(self.weights)} numbers for {len(self.train)} entries of train: give one for each")
        return self

    @model_validator(mode="after")
    def _streams_alone(self) -> "Data":
        streams = [name for name in self.train if is_stream(name)]
        if streams and len(streams) < len(self.train):
            raise ValueError(f"train mixes streams ({streams[0]}) with files: they are read in different ways; take one of both")
        if streams and self.stream_samples is None:
            raise ValueError("train names streams, whose samples nobody can count: say how many make an epoch with stream_samples")
        if streams and self.weights is not None:
            raise ValueError("weights need sources that can be read by place; train names streams")
        if STANDARD_INPUT in streams and len(streams) > 1:
            raise ValueError(
                "train names standard input (-) and other streams: it is read once, they are again and again; take one of both"
            )
        return self

    @property
    def streams(self) -> bool:
        """Whether `train` cannot be read by place."""
        return any(map(is_stream, self.train))

    @property
    def kind(self) -> Literal["webdataset", "table", "synthetic"]:
        """The format, with `auto` decided: tables end in .csv or .tsv, everything else is shards."""
        if self.format != "auto":
            return self.format
        tables = [PurePosixPath(name).suffix in (".csv", ".tsv") for name in self.train]
        return "table" if all(tables) else "webdataset"
