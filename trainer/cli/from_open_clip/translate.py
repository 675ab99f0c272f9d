"""How single flags of open_clip_train become keys: the functions of the table's rows."""

import ast
from collections.abc import Callable
from typing import Any

from trainer.cli.from_open_clip.imagenet import imagenet_words
from trainer.cli.from_open_clip.line import PIPE, SOURCES, Line, is_table
from trainer.cli.from_open_clip.translation import Flag, Translate, Translation
from trainer.errors import InputError
from trainer.model.catalog import known_models

TAB = "\t"
_NO_FORMAT = "the ending of the data says no format, and open_clip_train ends there, too"


def copy(change: Callable[[Any], Any] = lambda value: value) -> Translate:
    """Returns the translation of a flag whose value, changed by the function, becomes the only key's."""

    def translate(flag: Flag, line: Line, result: Translation) -> None:
        value = line[flag.name]
        if value is not None:
            result.set(flag.keys[0], change(value), named=flag.name in line.named)

    return translate


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
    elif line.format is not None:
        result.set("data.format", line.format)


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
        result.refused[flag.name] = "not there yet: a separator is one character here, no regular expression"
    elif line.reads_tables:
        result.set("data.separator", text)


def augmentation(flag: Flag, line: Line, result: Translation) -> None:
    """Takes the crop's scale; what else changes pictures is refused, the rest has no effect there, either."""
    settings: dict[str, Any] = line[flag.name]
    if scale := settings.get("scale"):
        result.set("data.crop_scale", [float(share) for share in scale])
    acting = [name for name in ("use_timm", "color_jitter_prob", "gray_scale_prob") if settings.get(name)]
    if acting:
        result.refused[flag.name] = f"not there yet: {', '.join(acting)}; pictures are only cropped"
    elif unused := [name for name in settings if name != "scale"]:
        result.dropped[flag.name] = f"without use_timm, open_clip_train does not use {', '.join(unused)}"


def model(flag: Flag, line: Line, result: Translation) -> None:
    """Names the model; --force-quick-gelu is the name of a variant."""
    name = line[flag.name]
    if "coca" in name.lower():
        result.refused[flag.name] = (
            "not wanted: CoCa also learns to write captions, for which there is no loss here; `clipship "
            "eval` takes such models"
        )
    variant = f"{name.replace('/', '-')}-quickgelu"
    if line["--force-quick-gelu"] and variant in known_models():
        result.set("model.name", variant, "--force-quick-gelu is this variant")
    else:
        result.set("model.name", name, named=flag.name in line.named)


def quick_gelu(flag: Flag, line: Line, result: Translation) -> None:
    """Checks that the model has a variant with QuickGELU, which `model` names."""
    name = line["--model"].replace("/", "-")
    if line[flag.name] and not name.endswith("-quickgelu") and f"{name}-quickgelu" not in known_models():
        result.refused[flag.name] = (
            f"not there yet: {name} has no variant with -quickgelu; give model.name a copy of its config "
            "file with quick_gelu = true"
        )


def pretrained(flag: Flag, line: Line, result: Translation) -> None:
    """Names the weights to start from."""
    if line[flag.name]:
        result.set("model.pretrained", line[flag.name])


PRECISIONS = {"amp": "fp16", "amp_bf16": "bf16", "amp_bfloat16": "bf16", "fp32": "fp32"}


def precision(flag: Flag, line: Line, result: Translation) -> None:
    """Names the precision of autocast; weights in half precision are refused."""
    given = line[flag.name]
    comment = ""
    if given not in PRECISIONS:
        result.refused[flag.name] = (
            f"not wanted: {given} keeps the weights in half precision, where small updates are lost; "
            "amp_bf16 keeps them in float32"
        )
        comment = f"instead of {given}: weights stay float32"
    elif given == "fp32":
        comment = "open_clip_train lets GPUs multiply in TF32 here; this does not"
    value = PRECISIONS.get(given) or ("fp16" if "fp16" in given else "bf16")
    result.set("model.precision", value, comment, named=flag.name in line.named)


def lock_image(flag: Flag, line: Line, result: Translation) -> None:
    """Locks the image tower with its batch norm."""
    if line[flag.name]:
        note = (
            "" if line["--lock-image-freeze-bn-stats"] else "statistics of batch norm stay as they are, too"
        )
        result.set("model.lock_image", True, note)


def lock_text(flag: Flag, line: Line, result: Translation) -> None:
    """Locks the text tower with its layer norms."""
    if line[flag.name]:
        note = "" if line["--lock-text-freeze-layer-norm"] else "layer norms are locked, too"
        result.set("model.lock_text", True, note)


def batch_size(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the batch of all GPUs, and the largest one that a GPU passes at once."""
    each, accumulated = line[flag.name], line["--accum-freq"]
    parts = f"{each} on each of {line.gpus} GPU{'s' if line.gpus > 1 else ''}"
    parts += f", {accumulated} times accumulated" if accumulated > 1 else ""
    result.set("optim.global_batch_size", line.global_batch, parts)
    result.set("optim.max_batch_size_per_gpu", each)


def accumulation(flag: Flag, line: Line, result: Translation) -> None:
    """Remarks that batch norm excludes accumulation; `batch_size` writes the global batch."""
    name, times = line["--model"], line[flag.name]
    if times > 1 and name.startswith("RN") and not line["--lock-image"]:
        needed = line.gpus * times
        result.notes.append(
            f"{name} has batch norm, which excludes accumulation here: start the job on {needed} GPUs"
        )


def epochs(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the length: the exact number of steps where open_clip_train's can be computed, else epochs."""
    if line.steps is None or line.epoch_steps is None:
        result.set("optim.epochs", line[flag.name])
        return
    counted = (
        f"{line[flag.name]:,} epochs of {line.epoch_steps:,} steps, as open_clip_train counts "
        f"{line['--train-num-samples']:,} samples"
    )
    result.set("optim.steps", line.steps, counted)


def learning_rate(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the peak; a warm-up that is cut short lowers it."""
    peak, _ = line.peak
    cut = f"the warm-up to {line['--lr']:g} ends with the training, here" if peak != line["--lr"] else ""
    result.set("optim.lr", peak, cut, named=flag.name in line.named)


def warmup(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the warm-up, no longer than the training."""
    _, steps = line.peak
    if line["--skip-scheduler"]:
        if flag.name in line.named:
            result.dropped[flag.name] = "it has no effect with --skip-scheduler"
        return
    cut = f"--warmup {line[flag.name]}, cut at the end of the training" if steps != line[flag.name] else ""
    result.set("optim.warmup_steps", steps, cut, named=flag.name in line.named)


def skip_scheduler(flag: Flag, line: Line, result: Translation) -> None:
    """Keeps the learning rate constant: a cosine between two equal values."""
    if line[flag.name]:
        result.set("optim.min_lr", line.peak[0], "equal to lr: the learning rate is constant")


def scheduler(flag: Flag, line: Line, result: Translation) -> None:
    """Takes cosine and const."""
    kind = line[flag.name]
    if kind == "const":
        result.set("optim.min_lr", line.peak[0], "equal to lr: constant after the warm-up")
    elif kind == "const-cooldown":
        result.refused[flag.name] = "not there yet: a cooldown at the end; cosine and const are there"
    elif kind != "cosine":
        result.refused[flag.name] = "open_clip_train ends, too: it has cosine, const and const-cooldown"


def optimizer(flag: Flag, line: Line, result: Translation) -> None:
    """Refuses every optimizer but AdamW."""
    if line[flag.name].lower() != "adamw":
        result.refused[flag.name] = f"{flag.fate}: {flag.text}"


def grad_clip(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the limit, and what it limited there."""
    if line[flag.name] is None:
        return
    note = ""
    if not line["--gather-with-grad"] and line.gpus > 1:
        note = (
            f"a limit on the whole gradient; without --gather-with-grad, the towers' was 1/{line.gpus} of it"
        )
    result.set("optim.grad_clip_norm", line[flag.name], note)


def siglip(flag: Flag, line: Line, result: Translation) -> None:
    """Names the loss, with open_clip_train's limit of the logit scale."""
    if line[flag.name]:
        result.set("optim.loss", "siglip")
        result.set("optim.max_logit_scale", 100.0, "open_clip_train's limit; without this line there is none")


def static_graph(flag: Flag, line: Line, result: Translation) -> None:
    """Sets the promise; accumulation excludes it here."""
    if line[flag.name] and line["--accum-freq"] > 1:
        result.refused[flag.name] = "it excludes accumulation here: take a smaller batch, or more GPUs"
    elif line[flag.name]:
        result.set("comm.torch.static_graph", True)


def validation(flag: Flag, line: Line, result: Translation) -> None:
    """Names the set for retrieval."""
    sources = line.split(flag.name)
    if not sources:
        return
    if any(source.startswith(PIPE) for source in sources):
        result.refused[flag.name] = "not there yet: ranks share an evaluation, and cannot share a stream"
    elif line.format_of(flag.name) == "synthetic":
        result.refused[flag.name] = "not there yet: synthetic data is only trained on"
    elif line.format_of(flag.name) is None:
        result.refused[flag.name] = f"{_NO_FORMAT}: give --dataset-type"
    elif line.format_of(flag.name) == "table" and not is_table(sources[0]):
        result.refused[flag.name] = "not there yet: a table to evaluate on ends in .csv or .tsv"
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
    names, templates = imagenet_words()
    result.set("eval.zero_shot", line[flag.name])
    result.set("eval.batch_size", line["--batch-size"], named=False)
    result.set("eval.class_names", names, "open_clip's names, in the order of the folders' WordNet numbers")
    result.set("eval.templates", templates, "open_clip's sentences")


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
        epochs = f"{every} epoch{'s' if every > 1 else ''}"
        result.set("eval.every_steps", every * line.epoch_steps, f"{epochs} {note}".strip())
    else:
        result.set("eval.every_epochs", every, note)


def save_frequency(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the steps between checkpoints, where the epoch's are known."""
    every = line[flag.name]
    if every > 0 and line.epoch_steps:
        result.set("checkpoint.every_steps", every * line.epoch_steps, f"--save-frequency {every}")
    elif every > 0 and flag.name in line.named:
        result.dropped[flag.name] = (
            "without --train-num-samples the steps of an epoch are not known: set checkpoint.every_steps, or "
            "keep one every 30 minutes (checkpoint.every_minutes)"
        )


def delete_previous(flag: Flag, line: Line, result: Translation) -> None:
    """Keeps one checkpoint."""
    if line[flag.name]:
        result.set("checkpoint.keep", 1)


def resume(flag: Flag, line: Line, result: Translation) -> None:
    """Names the checkpoint, or the newest one."""
    path = line[flag.name]
    if path is None:
        return
    if "://" in path:
        result.refused[flag.name] = "not there yet: a checkpoint behind a URL; copy it to a file"
    elif path == "latest":
        result.set("checkpoint.resume", "auto", "the newest of the run folder")
    else:
        result.set("checkpoint.resume", path)


def run_name(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the name, which a run needs here in order to be resumed."""
    made = line["--model"].replace("/", "-").replace(":", "-")
    note = "" if line[flag.name] else "open_clip_train would take the date; a run resumes by its name"
    result.set("name", line[flag.name] or made, note)


def logs(flag: Flag, line: Line, result: Translation) -> None:
    """Names the folder of runs; there is always one."""
    if line[flag.name].lower() in ("", "none"):
        result.dropped[flag.name] = "a run always has a folder: the supervisors and a resumed start read it"
    else:
        result.set("logging.runs", line[flag.name])


def report_to(flag: Flag, line: Line, result: Translation) -> None:
    """Turns the writers of metrics on and off."""
    result.set("logging.tensorboard", "tensorboard" in line.reports, named=False)
    if "wandb" in line.reports:
        result.set("logging.wandb", "online")


def wandb_project(flag: Flag, line: Line, result: Translation) -> None:
    """Names the project, if W&B is used."""
    if "wandb" in line.reports:
        result.set("logging.wandb_project", line[flag.name])


def device(flag: Flag, line: Line, result: Translation) -> None:
    """Takes cuda, where torch decides, and cpu."""
    kind, _, index = line[flag.name].partition(":")
    if kind == "cpu":
        result.set("resources.device", "cpu")
    elif kind != "cuda":
        result.refused[flag.name] = f"not there yet: {kind}; ranks compute on NVIDIA GPUs or CPUs"
    elif index:
        result.dropped[flag.name] = (
            "a rank takes the GPU of its number; CUDA_VISIBLE_DEVICES chooses among them"
        )


def dist_backend(flag: Flag, line: Line, result: Translation) -> None:
    """Takes nccl and gloo."""
    if line[flag.name] in ("nccl", "gloo"):
        result.set("comm.torch.device_backend", line[flag.name])
    elif line[flag.name] is not None:
        result.refused[flag.name] = f"not there yet: {line[flag.name]}; ranks communicate by NCCL or Gloo"


def horovod(flag: Flag, line: Line, result: Translation) -> None:
    """Names the backend."""
    if line[flag.name]:
        result.set("comm.backend", "horovod")


def turned_on(flag: Flag, line: Line, result: Translation) -> None:
    """Sets the only key of a switch to true if it is given."""
    if line[flag.name]:
        result.set(flag.keys[0], True)


def batch_norm(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the switch either way: it is on by default here."""
    result.set("model.sync_batch_norm", line[flag.name], named=flag.name in line.named)


def literal_pairs(texts: list[str]) -> dict[str, Any]:
    """Returns the settings of `key=value` texts, as open_clip_train's ParseKwargs reads them."""
    pairs: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--aug-cfg {text}: expected key=value")
        try:
            pairs[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            pairs[key] = value
    return pairs
