"""Translates flags about batch, length, learning rate and optimizer."""

from trainer.config.optimizers import NO_DECAY_IN_OPEN_CLIP_4, OPTIMIZERS
from trainer.from_open_clip.line import Line
from trainer.from_open_clip.translation import Flag, Translation
from trainer.text.wording import many

_TIMM_SPARES = ("*positional_embedding", "*class_embedding", "*cls_emb")


def batch_size(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the batch of all GPUs, and the largest one that a GPU passes at once."""
    each, accumulated = line.batch_per_gpu, line["--accum-freq"]
    parts = f"{each} on each of {many(line.gpus, 'GPU')}"
    parts += f", {accumulated} times accumulated" if accumulated > 1 else ""
    if len(line.naflex_batches) > 1:
        parts += ", the mean of those in open_clip_train, which differ with the patches of an image"
    result.set("optim.global_batch_size", line.global_batch, parts)
    if not line["--use-naflex"]:
        result.set("optim.max_batch_size_per_gpu", each)
    elif flag.name in line.named:
        result.dropped[flag.name] = "it has no effect with --use-naflex"


def accumulation(flag: Flag, line: Line, result: Translation) -> None:
    """Remarks that batch norm excludes accumulation; `batch_size` writes the global batch."""
    name, times = line["--model"], line[flag.name]
    if times > 1 and name.startswith("RN") and not line["--lock-image"]:
        needed = line.gpus * times
        result.notes.append(
            f"{name} has batch norm, which excludes accumulation here: start the job on {many(needed, 'GPU')}"
        )


def epochs(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the length: the exact number of steps where open_clip_train's can be computed, else epochs."""
    if line.steps is None or line.epoch_steps is None:
        result.set("optim.epochs", line[flag.name])
        return
    counted = (
        f"{many(line[flag.name], 'epoch')} of {many(line.epoch_steps, 'step')}, as open_clip_train counts "
        f"{many(line['--train-num-samples'], 'sample')}"
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


def scheduler(flag: Flag, line: Line, result: Translation) -> None:
    """Takes cosine, const and const-cooldown."""
    kind = line[flag.name]
    if kind == "const-cooldown" and line["--epochs-cooldown"] is None:
        result.refused[flag.name] = "open_clip_train ends, too: const-cooldown needs --epochs-cooldown"
    elif kind in ("const", "const-cooldown"):
        result.set("optim.schedule", "constant")
    elif kind != "cosine":
        result.refused[flag.name] = "open_clip_train ends, too: it has cosine, const and const-cooldown"


def cooldown(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the share of the epochs that the cooldown has."""
    epochs = line[flag.name]
    if epochs is None:
        return
    if not 0 < epochs <= line["--epochs"]:
        result.refused[flag.name] = f"a cooldown of {epochs} of {many(line['--epochs'], 'epoch')}"
        return
    result.set("optim.cooldown_share", epochs / line["--epochs"], f"{many(epochs, 'epoch')}")


def optimizer(flag: Flag, line: Line, result: Translation) -> None:
    """Takes AdamW and those of timm's optimizers that are made here; the others are refused."""
    if line.release == "4":
        result.set(
            "optim.no_decay", list(NO_DECAY_IN_OPEN_CLIP_4), "what release 4 spares for every optimizer"
        )
    kind, _, name = line[flag.name].lower().rpartition("/")
    if (kind, name) == ("", "adamw"):
        return
    names = {each: own for own, row in OPTIMIZERS.items() for each in (row.factory, row.synonym)}
    ours = names.get(name) if kind == "timm" and name else None
    if ours is None:
        known = ", ".join(
            f"timm/{row.factory}" for row in OPTIMIZERS.values() if row.factory and not row.differs_there
        )
        result.refused[flag.name] = (
            f"here are adamw and, of timm's, those that a resumed run repeats: {known}"
        )
        return
    if other := OPTIMIZERS[ours].differs_there:
        result.refused[flag.name] = f'{other}: optim.optimizer = "{ours}" is another one'
        return
    wanted = ["--momentum"] if ours == "sgd" else [f"--{key}" for key in OPTIMIZERS[ours].reads]
    if missing := [each for each in ("--lr", *wanted) if each not in line.named]:
        result.refused[flag.name] = f"timm's own defaults hold there: write {', '.join(missing)} out"
        return
    result.set("optim.optimizer", ours)
    if line.release != "4":
        result.set("optim.no_decay", _TIMM_SPARES, "the names that open_clip's models give timm")


def wd_exclude(flag: Flag, line: Line, result: Translation) -> None:
    """Adds patterns to those of `optimizer`."""
    if line[flag.name]:
        spared = result.settings["optim.no_decay"]
        result.set("optim.no_decay", [*spared.value, *line[flag.name]], spared.comment)


def momentum(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the momentum of timm's SGD."""
    if line[flag.name] is not None and line["--opt"].lower() in ("timm/nesterovw", "timm/sgdw"):
        result.set("optim.beta1", line[flag.name])


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
