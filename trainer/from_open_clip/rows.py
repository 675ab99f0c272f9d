"""Forms of the rows of the table of open_clip_train's flags, and what makes a flag idle there."""

from collections.abc import Callable, Mapping
from typing import Any

from trainer.from_open_clip import model_flags
from trainer.from_open_clip.line import Line
from trainer.from_open_clip.translation import Flag, Translate

TEXT: Mapping[str, Any] = {"type": str}
NUMBER: Mapping[str, Any] = {"type": float}
COUNT: Mapping[str, Any] = {"type": int}
TEXTS: Mapping[str, Any] = {"type": str, "nargs": "*", "default": []}
SWITCH: Mapping[str, Any] = {"action": "store_true", "default": False}


def a_text(default: str) -> dict[str, Any]:
    """Returns what a flag takes that has a text."""
    return {"type": str, "default": default}


def a_count(default: int) -> dict[str, Any]:
    """Returns what a flag takes that has a whole number."""
    return {"type": int, "default": default}


def a_number(default: float) -> dict[str, Any]:
    """Returns what a flag takes that has a number."""
    return {"type": float, "default": default}


def one_of(default: str | None, *choices: str) -> dict[str, Any]:
    """Returns what a flag takes that has one of some texts."""
    return {"type": str, "default": default, "choices": choices}


def key(name: str, takes: Mapping[str, Any], keys: str, translate: Translate, text: str, **more: Any) -> Flag:
    """Returns a row for a flag that sets keys (their names with spaces between them)."""
    return Flag(name, "key", text, tuple(keys.split()), translate, takes, **more)


def built_in(name: str, takes: Mapping[str, Any], text: str, **more: Any) -> Flag:
    """Returns a row for a flag that becomes no key, because every run does it."""
    return Flag(name, "built in", text, takes=takes, **more)


def dropped(name: str, takes: Mapping[str, Any], text: str, **more: Any) -> Flag:
    """Returns a row for a flag that is not wanted and without which the training is the same."""
    return Flag(name, "not wanted", text, takes=takes, harmless=True, **more)


def refused(name: str, takes: Mapping[str, Any], text: str, **more: Any) -> Flag:
    """Returns a row for a flag that is not wanted and changes what is trained."""
    return Flag(name, "not wanted", text, takes=takes, **more)


def missing(name: str, takes: Mapping[str, Any], text: str, **more: Any) -> Flag:
    """Returns a row for a flag that somebody may add one day."""
    return Flag(name, "not supported yet", text, takes=takes, **more)


def only_with(flag: str) -> Callable[[Line], str]:
    """Returns a test for a flag that has no effect in open_clip_train without another one."""
    return lambda line: "" if line[flag] else f"it has no effect without {flag}"


def only_for_cooldown(line: Line) -> str:
    """Returns why a flag of the cooldown has no effect."""
    used = line["--lr-scheduler"] == "const-cooldown" and not line["--skip-scheduler"]
    return "" if used else "only const-cooldown uses it"


def only_with_ddp(line: Line) -> str:
    """Returns why a flag of torch's DDP has no effect."""
    other = next((flag for flag in ("--horovod", "--fsdp") if line[flag]), None)
    return "" if other is None else f"it has no effect with {other}"


def not_with_horovod(line: Line) -> str:
    """Returns why a flag of torch.distributed has no effect."""
    return "it has no effect with --horovod" if line["--horovod"] else ""


def only_shards(line: Line) -> str:
    """Returns why a flag of shards has no effect."""
    return "" if line.reads_shards else "only shards have members"


def only_json(line: Line) -> str:
    """Returns why a flag of captions in JSON has no effect."""
    return only_shards(line) or only_with("--json-text-key")(line)


def only_coca(line: Line) -> str:
    """Returns why a flag of CoCa's loss has no effect."""
    return "" if model_flags.is_coca(line) else "only CoCa models use it"


def only_distilling(line: Line) -> str:
    """Returns why a flag of a teacher has no effect."""
    return "" if line.is_distilled else "only --distill-model with --distill-pretrained trains from a teacher"
