"""Translates flags about images of any shape (NaFlex)."""

from trainer.from_open_clip.line import Line
from trainer.from_open_clip.translation import Flag, Translation
from trainer.model.catalog import known_models, read_config
from trainer.model.image_tokens import takes_any_shape

_SHARES = "shares of the samples in open_clip_train, whose batches hold more images of fewer patches"


def use_naflex(flag: Flag, line: Line, result: Translation) -> None:
    """Refuses a tower that open_clip_train converts; the other flags say the rest."""
    if line[flag.name] and not _is_naflex(line):
        result.refused[flag.name] = (
            f"not supported yet: the image tower of {line['--model']} becomes another one there, and stays "
            "as it is here: name a model with naflex"
        )


def token_budgets(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the numbers of patches, and how often a step draws each."""
    if not _translates(line):
        return
    batches = line.naflex_batches
    if len(batches) == 1:
        result.set("model.image_tokens", min(batches))
        return
    result.set("model.image_tokens", list(batches), "evaluation takes the largest")
    samples = [often * size for often, size in batches.values()]
    shares = [round(each / sum(samples), 6) for each in samples]
    result.set("model.image_tokens_weights", shares, _SHARES)


def patches(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the sizes of patches."""
    if line[flag.name] and _translates(line):
        note = "evaluation takes the tower's own; in open_clip_train the first of these"
        result.set("model.image_patches", line[flag.name], note)


def patch_weights(flag: Flag, line: Line, result: Translation) -> None:
    """Writes how often each size of patches is drawn."""
    weights, sizes = line[flag.name], line["--naflex-patch-sizes"] or ()
    if weights is not None and _translates(line):
        result.set_weights(flag.name, "model.image_patches_weights", weights, len(sizes), "size")


def tokens_of_a_pass(flag: Flag, line: Line, result: Translation) -> None:
    """Writes the limit of a pass, which has to hold one image here."""
    if _translates(line):
        result.set("optim.max_image_tokens_per_gpu", max(line[flag.name], *line.naflex_batches))


def part_of_the_batch(flag: Flag, line: Line, result: Translation) -> None:
    """Writes nothing: `Line.naflex_batches` has the flag, and other flags write what follows."""


def _translates(line: Line) -> bool:
    return bool(line["--use-naflex"]) and _is_naflex(line)


def _is_naflex(line: Line) -> bool:
    """Returns whether the model takes images of any shape; the name says so of one that is not known."""
    name = line["--model"]
    return takes_any_shape(read_config(name)) if name in known_models() else "naflex" in name.lower()
