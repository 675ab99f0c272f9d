"""`[data]`: the training data and the order of its samples. Opens no file."""

from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from trainer.config.caption_key import parse_caption_key
from trainer.config.keys import MAY_CHANGE, JobPath
from trainer.config.types import STANDARD_INPUT, Positive, Section, Text, is_stream
from trainer.text.wording import many

Encoding = Literal[
    "utf-8", "gb18030", "big5", "cp950", "shift_jis", "cp932", "euc-jp", "euc-kr", "cp949", "cp1251",
    "cp1252", "latin-1"
]  # fmt: skip
"""Encodings of captions, by Python's names. All of them contain ASCII, so that lines end alike."""


class Data(Section):
    """Training data: what is read, in what order, and what happens to samples that cannot be read."""

    train: Annotated[tuple[Text, ...], JobPath("patterns")] = ()
    """Shards (`data/{0000..0099}.tar`: braces, globs and lists) or tables (.csv, .tsv). Only format =
    "synthetic" needs none. Streams (`pipe:COMMAND`, or `-` for standard input, once and with one rank) work
    too, with fewer guarantees on order and resuming."""
    format: Literal["auto", "webdataset", "table", "synthetic"] = "auto"
    """Format of `train`; auto decides by the names' endings."""
    image_key: tuple[Text, ...] = ("jpg", "jpeg", "png", "webp")
    """Shards: endings of the member that holds the image; the first one that a sample has is taken."""
    caption_key: Text = "txt"
    """Shards: ending of the member that holds the captions, one per line. JSON needs a colon and the path of
    the field: "json:caption", "json:meta.texts[0]", or "json:captions[*]" for every text of a list."""
    caption_choice: Literal["random", "first", "longest"] = "random"
    """Caption that training takes of a sample with several. random: one is drawn for each epoch, by the
    seed and the position; first; longest: that with the most characters. Retrieval counts all of them."""
    encoding: Encoding = "utf-8"
    """Encoding of captions, in members of shards (JSON too) and in .csv and .tsv tables. gb18030 also reads
    GBK and GB2312."""
    image_column: Text = "image"
    """Tables: column with the image file's path, relative to the table."""
    caption_column: Text = "caption"
    """Tables: column with the caption."""
    separator: Annotated[str, StringConstraints(min_length=1, max_length=1)] | None = None
    """Tables: the character between columns. None: a comma for .csv and a tab for .tsv."""
    shuffle_window: Positive = 10_000
    """Largest distance, in samples, that shuffling moves a sample within an epoch's sequence; shards are
    shuffled before."""
    crop_scale: tuple[float, float] = (0.9, 1.0)
    """Smallest and largest share of the image's area that the random crop in training keeps."""
    workers: Annotated[int, Field(ge=0, le=256), MAY_CHANGE] = 2
    """Loader processes per rank; 0 loads in the rank itself."""
    stream_samples: Positive | None = None
    """Samples in an epoch, over all ranks, if `train` names streams (`pipe:COMMAND`, `-`), which cannot be
    counted beforehand."""
    index: Annotated[Text | None, JobPath("folder", made=True), MAY_CHANGE] = None
    """Shards: folder of the index, which says where each sample is. Every rank reads it, and it is made if it
    is missing. None: .clipship-index beside the first shard, or in the run folder if that place is not
    writable."""
    weights: tuple[Annotated[float, Field(gt=0, le=1000)], ...] | None = None
    """One weight for each entry of `train`: how often an epoch contains its samples. 1 is once, 2 twice; with
    0.5 an epoch has one half of them and the next epoch the other half."""
    on_bad_sample: Annotated[Literal["skip", "fail"], MAY_CHANGE] = "skip"
    """skip: replace a sample that cannot be decoded by another one, count it and name it; fail: end the run.
    Samples without image or caption, and those behind a damaged place, show in the shards' headers: skip
    leaves them out at the start, fail does not begin the run."""
    max_bad_share: Annotated[float, Field(ge=0, le=1), MAY_CHANGE] = 0.01
    """With skip: largest share of bad samples; beyond it the run ends. At the start the samples that the
    shards' headers show as bad count (the loss of a damaged shard is estimated from the samples of the
    others), later those that a rank meets. 10 bad samples of less than 1,000 do not end the run."""
    max_image_pixels: Positive = 50_000_000
    """Largest image in pixels; a larger one is a bad sample and is not decoded. 50 million pixels take 150
    MB."""
    max_member_bytes: Annotated[int, Field(ge=1, le=4_000_000_000), MAY_CHANGE] = 256_000_000
    """Largest image or caption in bytes, in shards, streams, tables and folders alike; a larger one is a bad
    sample and is not read. The default is 256 x 10^6 bytes."""
    synthetic_samples: Positive = 1024
    """Samples in an epoch with format = "synthetic"."""

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

    @field_validator("caption_key")
    @classmethod
    def _readable(cls, value: str) -> str:
        parse_caption_key(value)
        return value

    @model_validator(mode="after")
    def _named(self) -> "Data":
        if not self.train and self.format != "synthetic":
            raise ValueError('train names no shards and no table; only format = "synthetic" needs none')
        if self.train and self.format == "synthetic":
            raise ValueError(
                f'train names data ({self.train[0]}), but format = "synthetic" trains on made-up pictures: '
                "remove one of the two"
            )
        if self.weights is not None and len(self.weights) != len(self.train):
            raise ValueError(
                f"weights has {many(len(self.weights), 'number')} for "
                f"{many(len(self.train), 'entry', 'entries')} of train: give one number for each entry"
            )
        return self

    @model_validator(mode="after")
    def _streams_alone(self) -> "Data":
        streams = [name for name in self.train if is_stream(name)]
        if streams and len(streams) < len(self.train):
            raise ValueError(
                f"train mixes streams ({streams[0]}) with files, which are read in another way: name only "
                "streams or only files"
            )
        if streams and self.stream_samples is None:
            raise ValueError(
                "train names streams, whose samples cannot be counted: set stream_samples to the number of "
                "samples in an epoch"
            )
        if streams and self.weights is not None:
            raise ValueError("weights need shards or tables; train names streams, which cannot be weighted")
        if STANDARD_INPUT in streams and len(streams) > 1:
            raise ValueError(
                "train names standard input (-) and other streams: standard input can be read only once, the "
                "others are read again and again; name only one of the two kinds"
            )
        return self

    @property
    def streams(self) -> bool:
        """True if `train` names streams, which can only be read from the beginning."""
        return any(map(is_stream, self.train))

    @property
    def kind(self) -> Literal["webdataset", "table", "synthetic"]:
        """The format, with `auto` decided: tables end in .csv or .tsv, everything else is shards."""
        if self.format != "auto":
            return self.format
        tables = [PurePosixPath(name).suffix in (".csv", ".tsv") for name in self.train]
        return "table" if all(tables) else "webdataset"
