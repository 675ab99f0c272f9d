"""Translates flags about data and evaluation."""

import ast
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from trainer.config.results import NAMED_SET
from trainer.errors import InputError
from trainer.evaluate.template_sets import IMAGENET
from trainer.from_open_clip.line import PIPE, SOURCES, Line, is_table
from trainer.from_open_clip.translation import Flag, Translate, Translation
from trainer.text.wording import many

TAB = "\t"
_PILLOWS_LIMIT = 256_000_000
"""Pixels beyond which Pillow refuses an image in open_clip_train."""
_ALONE = 0
"""Stands for a number that is in no brackets."""
_NO_FORMAT = "the ending of the data says no format, and open_clip_train ends there, too"


def train_data(flag: Flag, line: Line, result: Translation) -> None:
    """Names the training data."""
    if not line[flag.name] or line.format == "synthetic":
        if line[flag.name]:
            result.dropped[flag.name] = "--dataset-type synthetic reads no data"
        return
    note = ""
    if line.format == "table":
        note = "image paths of its rows start at the table's folder, not where the command is run"
    result.set("data.train", line.sources if len(line.sources) > 1 else line.sources[0], note)
    result.set("data.transparency", "drop_alpha", "as open_clip_train does")


def upsampling_factors(flag: Flag, line: Line, result: Translation) -> None:
    """Gives each source its weight."""
    text = line[flag.name]
    if text is None:
        return
    if any(source.startswith(PIPE) for source in line.sources):
        result.refused[flag.name] = "streams (pipe:) cannot be weighted here"
        return
    try:
        weights = [float(part) for part in text.split(SOURCES)]
    except ValueError:
        raise InputError(f"{flag.name} {text}: expected numbers with {SOURCES} between them") from None
    comment = "an epoch has as many samples as the weights say" if line.steps is None else ""
    result.set("data.weights", weights, comment)


def train_samples(flag: Flag, line: Line, result: Translation) -> None:
    """Counts streams and synthetic data; for shards the number decides the length, see `epochs`."""
    samples = line[flag.name]
    if samples is None:
        return
    if line.format == "synthetic":
        result.set("data.synthetic_samples", samples)
    elif line.format == "table":
        result.dropped[flag.name] = "the rows of a table are counted, by open_clip_train too"
    elif any(source.startswith(PIPE) for source in line.sources):
        result.set("data.stream_samples", samples)


def dataset_type(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the format that open_clip_train would take."""
    if line.format is None and line["--train-data"]:
        result.refused[flag.name] = f"{_NO_FORMAT}: name webdataset or csv"
    elif str(line[flag.name]).endswith("-audio"):
        result.refused[flag.name] = "not supported: audio"
    elif line.format is not None:
        result.set("data.format", line.format)
        if line.format == "webdataset" and not line["--json-text-key"]:
            result.set("data.caption_lines", "one")


def image_key(flag: Flag, line: Line, result: Translation) -> None:
    """Names the endings of images."""
    if flag.name in line.named:
        result.set("data.image_key", _alternatives(line[flag.name]))


def max_image_pixels(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the limit, which is another one here."""
    if line.reads_shards:
        note = "" if line[flag.name] else "Pillow's limit in open_clip_train, which has no other with 0"
        result.set("data.max_image_pixels", line[flag.name] or _PILLOWS_LIMIT, note)


def text_key(flag: Flag, line: Line, result: Translation) -> None:
    """Names the ending of captions."""
    endings = _alternatives(line[flag.name])
    if flag.name not in line.named:
        return
    if line["--json-text-key"]:
        result.dropped[flag.name] = "it has no effect with --json-text-key"
    elif len(endings) > 1:
        result.refused[flag.name] = (
            "not supported yet: several endings; a sample's captions lie in one member"
        )
    else:
        result.set("data.caption_key", endings)


def json_text_key(flag: Flag, line: Line, result: Translation) -> None:
    """Names the fields of captions."""
    fields = _alternatives(line[flag.name] or "")
    if odd := [field for field in fields if set(field) & set(".[]")]:
        result.refused[flag.name] = f"not supported yet: a field whose name has a dot or brackets: {odd[0]}"
    elif fields:
        result.set("data.caption_key", [f"json:{field}" for field in fields])
        if len(fields) > 1 and line["--json-text-key-probs"] is None:
            result.set("data.caption_choice", "first")


def json_text_weights(flag: Flag, line: Line, result: Translation) -> None:
    """Writes how often each field is taken."""
    weights, fields = line[flag.name], _alternatives(line["--json-text-key"] or "")
    if weights is not None:
        none_stands_in = ", and none stands in for others"
        result.set_weights(flag.name, "data.caption_weights", weights, len(fields), "field", none_stands_in)


def _alternatives(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


def for_tables(change: Callable[[Any], Any] = lambda value: value) -> Translate:
    """Returns the translation of a flag that only tables use; its default is always written."""

    def translate(flag: Flag, line: Line, result: Translation) -> None:
        if line.reads_tables:
            result.set(flag.keys[0], change(line[flag.name]))

    return translate


def separator(flag: Flag, line: Line, result: Translation) -> None:
    r"""Writes the separator; pandas reads the two characters `\t` as a tab."""
    text = TAB if line[flag.name] == r"\t" else line[flag.name]
    if line.reads_tables and len(text) != 1:
        result.refused[flag.name] = (
            "not supported yet: a separator is one character here, no regular expression"
        )
    elif line.reads_tables:
        result.set("data.separator", text)


def augmentation(flag: Flag, line: Line, result: Translation) -> None:
    """Takes what open_clip_train would change in pictures; the rest has no effect there, either."""
    settings: dict[str, Any] = {name: v for name, v in line[flag.name].items() if v not in (None, 0)}
    if line["--use-naflex"]:
        settings = {**settings, "use_timm": True}
        settings.pop("naflex", None)
    if "scale" in settings:
        result.set("data.crop_scale", _numbers(settings, "scale", 2))
    used = {"scale", "use_timm"} | (_with_timm if settings.get("use_timm") else _without)(settings, result)
    if unused := [name for name in settings if name not in used]:
        timm = "with" if settings.get("use_timm") else "without"
        result.dropped[flag.name] = f"{timm} use_timm, open_clip_train does not use {', '.join(unused)}"


def _without(settings: Mapping[str, Any], result: Translation) -> set[str]:
    """Translates the settings of open_clip's own augmentation; returns the names of those that it uses."""
    used: set[str] = set()
    if "color_jitter_prob" in settings:
        jitter = _numbers({"color_jitter": None, **settings}, "color_jitter", 4)
        result.set("data.augment.color_jitter", jitter)
        result.set("data.augment.color_jitter_prob", _numbers(settings, "color_jitter_prob", _ALONE)[0])
        used |= {"color_jitter", "color_jitter_prob"}
    if "gray_scale_prob" in settings:
        result.set("data.augment.gray_scale_prob", _numbers(settings, "gray_scale_prob", _ALONE)[0])
        used |= {"gray_scale_prob"}
    return used


def _with_timm(settings: Mapping[str, Any], result: Translation) -> set[str]:
    """Translates the settings of timm's augmentation; returns the names of those that it uses."""
    used: set[str] = set()
    if "re_prob" in settings:
        (probability,) = _numbers(settings, "re_prob", _ALONE)
        (count,) = _numbers({"re_count": 1, **settings}, "re_count", _ALONE)
        result.set("data.augment.erase_prob", probability, "timm's noise is normal, and uniform here")
        result.set("data.augment.erase_count", int(count) if count.is_integer() else count)
        used |= {"re_prob", "re_count"}
    if "ratio" in settings:
        result.set("data.augment.crop_ratio", _numbers(settings, "ratio", 2))
        used |= {"ratio"}
    if "color_jitter" in settings:
        values = _numbers(settings, "color_jitter", _ALONE, 3, 4)
        values = values * 3 if len(values) == 1 else values
        result.set("data.augment.color_jitter", [*values, 0.0][:4], "timm changes every picture")
        result.set("data.augment.color_jitter_prob", 1.0)
        used |= {"color_jitter"}
    return used


def _numbers(settings: Mapping[str, Any], name: str, *counts: int) -> list[float]:
    """Returns the numbers of a setting, of which there are `counts` in brackets, or one without (_ALONE).

    Raises InputError for anything else, with which open_clip_train ends, too.
    """
    given = settings[name]
    in_brackets = isinstance(given, tuple | list)
    values = list(given) if in_brackets else [given]
    with suppress(OverflowError):
        if (len(values) if in_brackets else _ALONE) in counts and all(
            type(v) in (int, float) for v in values
        ):
            return [float(v) for v in values]
    wanted = " or ".join(
        "a number" if count == _ALONE else f"{count} numbers in brackets" for count in counts
    )
    raise InputError(f"--aug-cfg {name}={str(given)[:80]}: expected {wanted}")


def literal_pairs(texts: list[str]) -> dict[str, Any]:
    """Returns the settings of --aug-cfg's `key=value` texts, as open_clip_train's ParseKwargs reads them."""
    pairs: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--aug-cfg {text}: expected key=value")
        try:
            pairs[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # as a text it is refused
            pairs[key] = value
    return pairs


def validation(flag: Flag, line: Line, result: Translation) -> None:
    """Names the set for retrieval."""
    sources = line.split(flag.name)
    if not sources:
        return
    if any(source.startswith(PIPE) for source in sources):
        result.refused[flag.name] = "not supported yet: ranks share an evaluation, and cannot share a stream"
    elif line.format_of(flag.name) == "synthetic":
        result.refused[flag.name] = "not supported yet: synthetic data is only trained on"
    elif line.format_of(flag.name) is None:
        result.refused[flag.name] = f"{_NO_FORMAT}: give --dataset-type"
    elif line.format_of(flag.name) == "table" and not is_table(sources[0]):
        result.refused[flag.name] = "not supported yet: a table to evaluate on ends in .csv or .tsv"
    elif not line["--val-frequency"]:
        result.dropped[flag.name] = "--val-frequency 0 never evaluates on it"
    else:
        result.set("eval.retrieval", sources if len(sources) > 1 else sources[0])
        result.set("eval.batch_size", line["--batch-size"], named=False)


def imagenet(flag: Flag, line: Line, result: Translation) -> None:
    """Names the folder, with the class names and templates that open_clip_train takes."""
    if line[flag.name] is None:
        return
    if not line["--zeroshot-frequency"]:
        result.dropped[flag.name] = "--zeroshot-frequency 0 never evaluates on it"
        return
    result.set("eval.zero_shot", line[flag.name])
    result.set("eval.batch_size", line["--batch-size"], named=False)
    names = f"{NAMED_SET}{IMAGENET}"
    result.set("eval.class_names", names, "open_clip's names, in the order of the folders' WordNet numbers")
    result.set("eval.templates", names, "open_clip's sentences")


def frequency(flag: Flag, line: Line, result: Translation) -> None:
    """Writes how often both sets are evaluated: as often as both need, at the same steps."""
    every = line.evaluated_every
    if not every:
        if flag.name in line.named and line[flag.name]:
            result.dropped[flag.name] = "there is nothing to evaluate on"
        return
    differ = line["--val-data"] and line["--imagenet-val"]
    differ = differ and line["--val-frequency"] != line["--zeroshot-frequency"]
    note = "of both sets: there is one frequency here" if differ else ""
    if line.epoch_steps:
        epochs = f"{many(every, 'epoch')}"
        result.set("eval.every_steps", every * line.epoch_steps, f"{epochs} {note}".strip())
    else:
        result.set("eval.every_epochs", every, note)
