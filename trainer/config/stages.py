"""`[[stage]]`: stages of a run that follow the job's own training, each of them a job like any other.

A stage begins with the weights of the one before, fitted to its own size of images and captions, and with a
new optimizer. Its seed is the job's plus the number of stages before, so that no stage repeats the order and
the crops of another. Imports no torch.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainer.config.keys import JobPath, rank_paths, section_of, with_paths_from
from trainer.config.tables import merged
from trainer.config.toml_lines import Key
from trainer.config.types import STANDARD_INPUT
from trainer.text.near import did_you_mean

if TYPE_CHECKING:
    from trainer.config.job import Job

NAME = "name"
"""Key of a stage beside its sections."""
_OF_MODEL = (
    *("image_size", "image_tokens", "image_tokens_weights", "image_patches", "image_patches_weights"),
    *(
        "context_length",
        "init_keep_positions",
        "patch_dropout",
        "lock_image",
        "lock_image_unlocked_groups",
        "lock_text",
    ),
    *("lock_text_unlocked_layers", "unlock_after_step", "grad_checkpointing"),
)
"""Keys of [model] that a stage may have: it changes neither weights nor their number."""
_NOT_OF_A_STAGE = (
    "optim.loss",
    "optim.anchor",
    "optim.decay_from_step",
    "optim.decay_from_lr",
    "data.storage",
)
"""Keys of [optim] and [data] that a stage has from the job."""
_LENGTHS = ("steps", "epochs")
"""Keys of which one is given: that of a stage takes the place of the job's."""
_SEEDS = 2**31
_BEGIN = ("pretrained", "init")
"""Keys that say where a run begins; a stage begins with the weights of the one before."""

_READ_TWICE = (
    f"data.train = {STANDARD_INPUT}: standard input is read once, and stages whose [data] differ would each "
    "open it: the later one misses what the earlier one has read ahead. Give each the same [data], or name "
    "files or pipe:COMMAND."
)


class StageProblem(ValueError):
    """Raised for a stage that makes no job; `problems` has each with the key in the job file."""

    def __init__(self, problems: list[tuple[Key, str]]) -> None:
        super().__init__("\n".join(text for _, text in problems))
        self.problems = problems


def stages_of(job: "Job") -> tuple["Job", ...]:
    """Returns the job of each stage of a run: its own without [[stage]], then those with a stage's changes.

    Raises StageProblem.
    """
    if not job.stage:
        return (job,)
    if problems := list(_not_with_stages(job)):
        raise StageProblem(problems)
    first = job.model_copy(update={"stage": ()})
    found = (first, *(_changed(first, stage, number) for number, stage in enumerate(job.stage, 2)))
    reading = [own.data for own in found if STANDARD_INPUT in own.data.train]
    if any(data != reading[0] for data in reading):
        raise StageProblem([(("stage",), _READ_TWICE)])
    return found


def stage_title(job: "Job", number: int) -> str:
    """Returns what a stage is called: its number, and its name if it has one."""
    name = job.stage[number - 2].get(NAME) if number > 1 else None
    return f"stage {number}" + (f" ({name})" if name else "")


def standard_input(job: "Job") -> str:
    """Returns the key of the first stage that reads standard input, as messages name it; "" if none does."""
    for number, own in enumerate(stages_of(job), 1):
        if STANDARD_INPUT in own.data.train:
            of_stage = f" of {stage_title(job, number)}" if number > 1 else ""
            return f"data.train = {STANDARD_INPUT}{of_stage}"
    return ""


def paths_of_ranks(job: "Job") -> Iterator[tuple[str, JobPath]]:
    """Yields `rank_paths` of every stage, each pair once: a folder may have one key that makes it."""
    yield from dict.fromkeys(pair for own in stages_of(job) for pair in rank_paths(own))


def with_stage_paths(job: "Job", base: Path) -> "Job":
    """Returns the job whose stages have paths joined to `base`, as `with_paths_from` does for its own."""
    if not job.stage:
        return job
    jobs = (with_paths_from(each, base) for each in stages_of(job)[1:])
    stages = tuple(_taken(table, each) for table, each in zip(job.stage, jobs, strict=True))
    return job.model_copy(update={"stage": stages})


def _taken(table: Mapping[str, Any], job: "Job") -> dict[str, Any]:
    """Returns the stage's table with the values that its job has for the same keys."""
    whole = job.model_dump(include=set(table) - {NAME})
    return {name: value if name == NAME else _same_keys(value, whole[name]) for name, value in table.items()}


def _same_keys(asked: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _same_keys(value, held[key]) if isinstance(value, dict) else held[key]
        for key, value in asked.items()
    }


def _not_with_stages(job: "Job") -> Iterator[tuple[Key, str]]:
    """Yields what a job with stages cannot have."""
    for key, value, why in (
        ("eval.mix", job.eval.mix, "mixes trained weights with the first ones, which only one stage knows"),
        ("optim.anchor", job.optim.anchor, "pulls to the first weights, which only one stage knows"),
        ("model.lora_rank", job.model.lora_rank, "trains weights beside others, which no stage adds up"),
    ):
        if value:
            yield ("stage",), f"not with {key}, which {why}: leave one of the two out"


def _changed(first: "Job", stage: Mapping[str, Any], number: int) -> "Job":
    if problems := list(_unknown(type(first), stage, number)):
        raise StageProblem(problems)
    table = first.model_dump(exclude_unset=True, exclude={"stage"})
    model = {key: value for key, value in table.get("model", {}).items() if key not in _BEGIN}
    optim = table["optim"]
    if any(key in stage.get("optim", {}) for key in _LENGTHS):
        optim = {key: value for key, value in optim.items() if key not in _LENGTHS}
    table |= {"model": model, "optim": optim, "seed": (first.seed + number - 1) % _SEEDS}
    try:
        return type(first).model_validate(merged(table, {k: v for k, v in stage.items() if k != NAME}))
    except ValidationError as error:
        from trainer.config.messages import problem_texts  # a job that is right waits for no words

        raise StageProblem(
            [(("stage", *key), f"stage {number}: {text}") for key, text in problem_texts(error)]
        ) from None


def _unknown(job: type["Job"], stage: Mapping[str, Any], number: int) -> Iterator[tuple[Key, str]]:
    """Yields a problem for each key that a stage cannot have."""
    for section, keys in stage.items():
        if section == NAME:
            if not isinstance(keys, str) or not keys.isprintable() or not 0 < len(keys) <= 100:
                yield ("stage", NAME), f"stage {number}: a name has 1 to 100 printable characters"
            continue
        allowed = _allowed(job, section)
        if not allowed or not isinstance(keys, Mapping):
            known = [name for name in job.model_fields if _allowed(job, name)]
            yield (
                ("stage", section),
                f"stage {number}: it has a name and sections {', '.join(known)}, such as [stage.optim]",
            )
            continue
        for key in keys:
            if key not in allowed:
                hint = did_you_mean(key, allowed) or f"; it may have {', '.join(allowed)}"
                text = f"stage {number}: no stage has {section}.{key} of its own{hint}"
                yield ("stage", section, key), text


def _allowed(job: type["Job"], section: str) -> list[str]:
    """Returns the keys of a section that a stage may have; empty for another section."""
    if section == "model":
        return list(_OF_MODEL)
    held = section_of(job.model_fields[section]) if section in ("optim", "data") else None
    return [key for key in held.model_fields if f"{section}.{key}" not in _NOT_OF_A_STAGE] if held else []
