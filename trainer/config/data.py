"""`[data]`: the training data and the order of its samples. Opens no file."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from trainer.config.augment import Augment
from trainer.config.caption_key import (
    PLAIN,
    CaptionKeys,
    column_path,
    one_column_path,
    parse_caption_keys,
)
from trainer.config.caption_template import check_fields, parse_template
from trainer.config.filters import (
    BY_KEY,
    CLIP_SCORE,
    Filter,
    check_in_shards,
    check_scored,
    filter_place,
    parse_filter,
    score_column,
)
from trainer.config.formats import FORMATS, format_of
from trainer.config.keys import MAY_CHANGE, JobPath, OnlyIf
from trainer.config.storage import Storage
from trainer.config.stores import stores_of
from trainer.config.types import (
    STANDARD_INPUT,
    Positive,
    Section,
    Text,
    each,
    is_stream,
    one_or_many,
    optional_section,
)
from trainer.text.wording import many

Encoding = Literal[
    "utf-8", "gb18030", "big5", "cp950", "shift_jis", "cp932", "euc-jp", "euc-kr", "cp949", "cp1251",
    "cp1252", "latin-1"
]  # fmt: skip
"""Encodings of captions, by Python's names. All of them contain ASCII, so that lines end alike."""


def _trains_with(key: str, why_not: str) -> OnlyIf:
    """Returns the condition of keys that the format of the training data must read, as it reads `key`."""
    return OnlyIf(lambda job: key in FORMATS[job.data.kind].reads, why_not)


def _reads(key: str, why_not: str) -> OnlyIf:
    """Returns the condition of keys that a format of training or retrieval must read, as it reads `key`."""
    return OnlyIf(lambda job: any(key in row.reads for row in job.formats), why_not)


def _measures_or_trains_with(key: str, why_not: str) -> OnlyIf:
    """Returns the condition of keys that every evaluation reads, and training as its format reads `key`."""
    return OnlyIf(lambda job: key in FORMATS[job.data.kind].reads or job.eval.anywhere, why_not)


_FILES = _measures_or_trains_with("max_member_bytes", 'data.format = "synthetic" reads no file')
_BAD_SAMPLES = _measures_or_trains_with("on_bad_sample", 'data.format = "synthetic" has no bad samples')
_BAD_ARE_SKIPPED = OnlyIf(
    lambda job: job.data.on_bad_sample != "fail", 'data.on_bad_sample = "fail" allows no bad sample'
)
_ANY_SHARDS = OnlyIf(
    lambda job: bool(job.eval.zero_shot) or any("image_key" in row.reads for row in job.formats),
    "the job reads no shards",
)
_SHARDS = _reads("caption_key", "neither training nor retrieval reads shards")
_PLAIN_TEXT = OnlyIf(
    lambda job: job.data.caption_keys.paths is None, "captions come from JSON, where each text is one"
)
_TABLES = _reads("image_column", "neither training nor retrieval reads a table")
_TEXT_TABLES = _reads("separator", "neither training nor retrieval reads a .csv or .tsv table")
_ROW_GROUPS = _reads("row_group_cache_mb", "neither training nor retrieval reads Parquet or Arrow")
_NO_TEMPLATE = OnlyIf(lambda job: not job.data.caption_template, "data.caption_template names the columns")
_SEVERAL_CAPTIONS = OnlyIf(
    lambda job: job.data.kind != "table" or len(job.data.caption_entries) != 1,
    "a row of a table has one caption",
)
_FILTERED = _trains_with("filters", 'data.format = "synthetic" has no sample to leave out')
_SCORED = OnlyIf(
    lambda job: any(score_column(parse_filter(text).name) for text in job.data.filters),
    "no filter compares a column of data.scores (clip_score, scores:NAME, scores:listed)",
)
_GROUPED = OnlyIf(
    lambda job: job.optim.positives == "groups", 'no id is asked for: optim.positives is not "groups"'
)
_CAPTIONS = _reads("caption_template", 'data.format = "synthetic" has captions of its own')
_ENCODED = _reads("encoding", "the job reads no text that may have another encoding")
_INDEXED = OnlyIf(
    lambda job: "index" in FORMATS[job.data.kind].reads and not job.data.streams,
    "the training data have no index",
)
_CACHED = OnlyIf(lambda job: job.data.cache is not None, "there is no data.cache")
_IN_BLOCKS = OnlyIf(
    lambda job: "block_samples" in FORMATS[job.data.kind].reads and not job.data.streams,
    "training reads no shards by offset",
)
_AHEAD = OnlyIf(
    lambda job: "read_ahead_mb" in FORMATS[job.data.kind].reads and not job.data.streams,
    "training reads neither shards by offset nor Parquet",
)
_STREAMS = OnlyIf(lambda job: job.data.streams, "data.train names no stream (pipe:, -)")
_STORED = OnlyIf(
    lambda job: bool(stores_of(job.addresses)) or any("image_column" in row.reads for row in job.formats),
    "the job names no address of object storage (s3://, gs://, oss://, obs://, az://)",
)
_SYNTHETIC = _trains_with("synthetic_samples", 'data.format is not "synthetic"')


class Data(Section):
    """Training data: what is read, in what order, and what happens to samples that cannot be read."""

    train: Annotated[tuple[Text, ...], JobPath("patterns")] = ()
    """Shards (`data/{0000..0099}.tar`: braces, globs and lists) or tables (.csv, .tsv, .parquet,
    .arrow). Only format = "synthetic" needs none. Streams (`pipe:COMMAND`, or `-` for standard input, once
    and with one rank) work too, with fewer guarantees on order and resuming."""
    format: Literal["auto", "webdataset", "table", "parquet", "arrow", "synthetic"] = "auto"
    """Format of `train`; auto decides by the names' endings: .csv and .tsv are tables, .parquet, .arrow and
    .feather are what they say, all others are shards."""
    image_key: Annotated[tuple[Text, ...], _ANY_SHARDS] = ("jpg", "jpeg", "png", "webp")
    """Shards: endings of the member that holds the image; the first one that a sample has is taken."""
    caption_template: Annotated[tuple[Text, ...], _CAPTIONS] = ()
    """Captions made of several fields: "{title}. {caption}". Fields are paths into the sample's JSON (member
    .json, or the one that caption_key names), or columns of a table, then instead of caption_column. A
    template of which a field is null or empty gives no caption."""
    caption_key: Annotated[tuple[Text, ...], _SHARDS] = PLAIN
    """Shards: ending of the member that holds the captions (see caption_lines). JSON needs a colon and the
    path of the field: "json:caption", "json:meta.texts[0]", or "json:captions[*]" for every text of a list.
    Several paths into one JSON give a sample the captions of all: ["json:caption", "json:alt"]."""
    empty_captions: Annotated[tuple[Text, ...], _CAPTIONS] = ("nan", "NaN", "None", "null", "NULL", "<NA>")
    """Captions that count as none, as pandas and others write a missing value. A sample without any other
    caption is a bad sample, which is counted and named. [] trains on them."""
    caption_lines: Annotated[Literal["several", "one"], _SHARDS, _PLAIN_TEXT] = "several"
    """Shards: meaning of the lines of a plain text. several: each is a caption; one: all are one caption, as
    open_clip takes them."""
    caption_choice: Annotated[Literal["random", "first", "longest"], _SEVERAL_CAPTIONS] = "random"
    """Caption that training takes of a sample with several. random: one is drawn for each epoch, by the
    seed and the position; first; longest: that with the most characters. Retrieval counts all of them."""
    caption_weights: Annotated[tuple[Annotated[float, Field(gt=0, le=1000)], ...] | None, _CAPTIONS] = None
    """One weight for each entry of caption_key, of caption_column or of caption_template: how often
    training draws a caption of this entry, among those of which the sample has one. None: each caption of
    the sample is as likely as another."""
    encoding: Annotated[Encoding, _ENCODED] = "utf-8"
    """Encoding of captions, in members of shards (JSON too) and in .csv and .tsv tables. gb18030 also reads
    GBK and GB2312."""
    text_mask: Literal["random", "shuffle", "simple"] | None = None
    """Shortens captions that are too long for the model, in training, by the seed and the position. random:
    some tokens are left out; shuffle: and the others are shuffled; simple: a part in one piece is taken.
    None: the beginning is taken. Only for open_clip's own tokenizer."""
    image_column: Annotated[Text, _TABLES] = "image"
    """Tables: column with the image file's path, relative to the table, or a URL. In Parquet and Arrow it may
    hold the image's bytes, and may lie in a column: "sample.image"."""
    caption_column: Annotated[tuple[Text, ...], _TABLES, _NO_TEMPLATE] = ("caption",)
    """Tables: column with the caption. A row has one caption of each of several columns. In Parquet and Arrow
    a path as after the colon of caption_key: "captions[*]", "meta.title"; a column that has a dot in its name
    stands in quotes: '"meta.caption"'."""
    separator: Annotated[
        Annotated[str, StringConstraints(min_length=1, max_length=1)] | None, _TEXT_TABLES
    ] = None
    """Tables: the character between columns. None: a comma for .csv and a tab for .tsv."""
    quotes: Annotated[Literal["cells", "text"], _TEXT_TABLES] = "cells"
    """Tables: meaning of a double quote at the begin of a cell. cells: the cell ends at the next one, and may
    hold separators and line breaks; text: quotes are text, as pandas writes them with QUOTE_NONE."""
    row_group_cache_mb: Annotated[Positive, MAY_CHANGE, _ROW_GROUPS] = 512
    """Parquet and Arrow: memory for row groups, of a rank for those of Parquet, of each loader process for
    those of Arrow that it has read last. A batch has samples of as many row groups as fit."""
    block_samples: Annotated[Positive | None, _IN_BLOCKS] = None
    """Shards: neighbouring samples that are read at once. Blocks are shuffled, and each rank reads its own
    one after the other, while a batch has samples of as many blocks as can be. None: as many samples as make
    4 MiB, and fewer where a rank's open blocks would take more than an eighth of its part of the node's
    memory, or more than 1 GiB; chosen at a run's first start, and kept on any number of ranks."""
    read_ahead_mb: Annotated[Positive, MAY_CHANGE, _AHEAD] = 64
    """Shards and Parquet: memory of a rank for what is read before it is needed, at least for the next block,
    beside those in use. Slow storage wants more."""
    cache: Annotated[Text | None, JobPath("folder", made=True), MAY_CHANGE, _AHEAD] = None
    """Shards and Parquet: folder on each node's own disk that keeps what was read, for later epochs and
    starts. The node's ranks and the user's other jobs share it. None: nothing is kept."""
    cache_gb: Annotated[Positive, MAY_CHANGE, _CACHED] = 100
    """Size of the cache in 10^9 bytes, about; what was not used for longest goes. All ranks and jobs that
    share the folder should say the same."""
    shuffle_window: Annotated[int, Field(ge=1, le=1000), _STREAMS] = 1000
    """Streams: samples that each loader process holds in memory, encoded, to draw the next one from."""
    crop_scale: tuple[float, float] = (0.9, 1.0)
    """Smallest and largest share of the image's area that the random crop in training keeps."""
    augment: Augment = optional_section(Augment)
    storage: Annotated[Storage, MAY_CHANGE, _STORED] = optional_section(Storage)
    workers: Annotated[int, Field(ge=0, le=256), MAY_CHANGE] = 2
    """Loader processes per rank; 0 loads in the rank itself."""
    stream_samples: Annotated[Positive | None, _STREAMS] = None
    """Samples in an epoch, over all ranks, if `train` names streams (`pipe:COMMAND`, `-`), which cannot be
    counted beforehand."""
    index: Annotated[Text | None, JobPath("folder", made=True), MAY_CHANGE, _INDEXED] = None
    """Shards: folder of the index, which says where each sample is. Every rank reads it, and it is made if it
    is missing. None: .clipship-index beside the first shard, or in the run folder if that place is not
    writable."""
    weights: tuple[Annotated[float, Field(gt=0, le=1000)], ...] | None = None
    """One weight for each entry of `train`: how often an epoch contains its samples. 1 is once, 2 twice; with
    0.5 an epoch has one half of them and the next epoch the other half."""
    filters: Annotated[tuple[Text, ...], _FILTERED] = ()
    """Conditions that a sample must fulfil: "min_side >= 256", "max_aspect <= 3" (longer side divided by
    the shorter one), "clip_score >= 0.28". width, height, min_side, max_side, max_aspect and pixels are those
    of the image; other names are fields of the sample's JSON, columns of a table, or of `scores`. They are
    decided when the data are indexed; samples that a filter leaves out are counted, and are not bad."""
    scores: Annotated[tuple[Text, ...], JobPath("patterns"), _SCORED] = ()
    """Shards, Parquet, Arrow: tables with values for filters: Parquet files with a column key (or uid), and
    perhaps shard, or a folder with one for each shard, as `clipship embed` writes them. clip_score is their
    cosine, scores:NAME a column, of whose rows for a sample the largest counts. A list of keys (.txt, a line
    each, or DataComp's .npy of uids) has no columns: "scores:listed == true" keeps what is in it. A sample
    without a row is a bad one, unless that is what is asked for."""
    scores_by: Annotated[Text, _SCORED] = BY_KEY
    """Name by which rows of `scores` belong to samples. key: the sample's key; else a field of its JSON, or a
    column, as in filters, such as json:uid."""
    group_by: Annotated[Text | None, _GROUPED] = None
    """With optim.positives = "groups": field or column with the id of each sample's group, named as in
    filters: json:group_id in shards, else a column. An id is a text or a whole number, and 7 is the same id
    as "7", but not "07"; another value makes a bad sample. A sample without one (null, empty, no field) is a
    positive of its own pair alone, and is counted and named. Not for streams."""
    on_bad_sample: Annotated[Literal["skip", "fail"], MAY_CHANGE, _BAD_SAMPLES] = "skip"
    """skip: replace a sample that cannot be decoded by another one, count it and name it; fail: end the run.
    Samples without image or caption, and those behind a damaged place, show in the shards' headers: skip
    leaves them out at the start, fail does not begin the run."""
    max_bad_share: Annotated[float, Field(ge=0, le=1), MAY_CHANGE, _BAD_SAMPLES, _BAD_ARE_SKIPPED] = 0.01
    """With skip: largest share of bad samples; beyond it the run ends. At the start the samples that the
    shards' headers show as bad count (the loss of a damaged shard is estimated from the samples of the
    others), later those that a rank meets. 10 bad samples of less than 1,000 do not end the run."""
    max_image_pixels: Annotated[Positive, _FILES] = 50_000_000
    """Largest image in pixels; a larger one is a bad sample and is not decoded. 50 million pixels take 150
    MB."""
    transparency: Annotated[Literal["white", "drop_alpha"], _FILES] = "white"
    """Colour of a picture's transparent parts. white: as a viewer shows them; drop_alpha: the colour that
    lies in the file, often black, as open_clip takes them. drop_alpha is the default where checkpoint.resume
    names a file of open_clip_train (.pt)."""
    max_member_bytes: Annotated[int, Field(ge=1, le=4_000_000_000), MAY_CHANGE, _FILES] = 256_000_000
    """Largest image or caption in bytes, in shards, streams, tables and folders alike; a larger one is a bad
    sample and is not read. The default is 256 x 10^6 bytes."""
    synthetic_samples: Annotated[Positive, _SYNTHETIC] = 1024
    """Samples in an epoch with format = "synthetic"."""

    _lists = field_validator(
        "train", "caption_key", "caption_column", "caption_template", "filters", "scores", mode="before"
    )(one_or_many)

    @field_validator("crop_scale")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1] <= 1:
            raise ValueError("must be two numbers, 0 < smallest <= largest <= 1")
        return value

    _templates = field_validator("caption_template")(each(parse_template))

    _filters = field_validator("filters")(each(parse_filter))

    @field_validator("caption_key", "caption_column")
    @classmethod
    def _some(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("must name one place of captions at least")
        return value

    @field_validator("caption_key")
    @classmethod
    def _readable(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        parse_caption_keys(value, templates=bool(info.data.get("caption_template")))
        return value

    @model_validator(mode="after")
    def _captions(self) -> "Data":
        fields = FORMATS[self.kind].fields
        if fields != "columns":
            check_fields(self.caption_template)
        if fields == "nested columns":
            for name in self.caption_column:
                column_path("caption_column", name)
            one_column_path("image_column", self.image_column)
        if self.caption_weights is not None:
            self._check_caption_weights(self.caption_weights)
        return self

    def _check_caption_weights(self, weights: tuple[float, ...]) -> None:
        entries = self.caption_entries
        if len(weights) != len(entries):
            raise ValueError(
                f"caption_weights has {many(len(weights), 'number')} for {many(len(entries), 'source')} of "
                f"captions ({', '.join(entries)}): give one number for each"
            )
        if self.caption_choice != "random":
            raise ValueError(
                f'caption_weights draw a caption, and caption_choice = "{self.caption_choice}" draws none: '
                "remove one of the two"
            )

    @model_validator(mode="after")
    def _filterable(self) -> "Data":
        row = FORMATS[self.kind]
        for condition in map(parse_filter, self.filters):
            if score_column(condition.name) is not None and (self.scores or condition.name != CLIP_SCORE):
                self._check_scored(condition)
                continue
            if condition.measures and row.endings and not row.measures_images:
                raise ValueError(
                    f"filters: {condition.name} needs the headers of images, which are not read for "
                    f"{', '.join(row.endings)}: pack the {row.unit} into shards with `clipship pack`, or "
                    "name a column with the size"
                )
            if row.fields == "json":
                check_in_shards(condition)
            elif row.fields == "nested columns" and not condition.measures:
                one_column_path("filters", condition.name)
        return self

    @model_validator(mode="after")
    def _groupable(self) -> "Data":
        if self.group_by is not None and FORMATS[self.kind].fields == "json":
            filter_place(self.group_by)
        elif self.group_by is not None and FORMATS[self.kind].fields == "nested columns":
            one_column_path("group_by", self.group_by)
        return self

    def _check_scored(self, condition: Filter) -> None:
        """Raises ValueError for a condition on `scores` that cannot be decided."""
        row = FORMATS[self.kind]
        if not self.scores:
            raise ValueError(f"filters: {condition.text} compares a column of scores: name the tables there")
        if row.unit and "scores" not in row.reads:
            raise ValueError(
                f"scores are joined when data are indexed, and a {row.unit} is not: put the values into a "
                "column of it"
            )
        check_scored(condition)
        if self.scores_by != BY_KEY and row.fields == "json":
            filter_place(self.scores_by)
        elif self.scores_by != BY_KEY:
            one_column_path("scores_by", self.scores_by)

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
        if streams and self.filters:
            raise ValueError(
                "filters are decided when data are indexed, and streams, which train names, are not: filter "
                "in the command of the stream"
            )
        if STANDARD_INPUT in streams and len(streams) > 1:
            raise ValueError(
                "train names standard input (-) and other streams: standard input can be read only once, the "
                "others are read again and again; name only one of the two kinds"
            )
        return self

    @property
    def caption_keys(self) -> CaptionKeys:
        """The member of a shard's sample that has the captions, and the paths in it."""
        return parse_caption_keys(self.caption_key, templates=bool(self.caption_template))

    @property
    def caption_entries(self) -> tuple[str, ...]:
        """The keys, columns or templates that captions come from."""
        keys = self.caption_key if "caption_key" in FORMATS[self.kind].reads else self.caption_column
        return self.caption_template or keys

    @property
    def streams(self) -> bool:
        """True if `train` names streams, which can only be read from the beginning."""
        return any(map(is_stream, self.train))

    @property
    def kind(self) -> str:
        """The name of the format, in FORMATS, with `auto` decided by the endings of `train`."""
        return self.format if self.format != "auto" else format_of(self.train).name
