"""Model card of an exported model: README.md as hubs show it. Imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w

from trainer.config.loader import key_defaults
from trainer.sysinfo.own_table import own_table
from trainer.text.masking import masked_values
from trainer.text.yaml_text import yaml

_SECTIONS = ("data", "model", "optim", "eval")
"""Sections that decide what was trained and measured."""
_OF_THE_MACHINE = {"data.workers", "data.index", "model.cache_dir", "model.offline"}
"""Keys of these sections that say something of the machine alone."""
_ABOUT_JOB = "What differs from Clipship's defaults; of paths the last part."
_LIBRARY = {
    "open_clip": "open_clip",
    "hf": "transformers",
    "peft": "peft",
    "safetensors": "open_clip",
    "onnx": "onnx",
}


def model_card(name: str, to: str, license_name: str, manifest: Mapping[str, Any]) -> str:
    """Returns the text of the card; `manifest` is that of the checkpoint, empty if it is not Clipship's.

    Secrets in the job are masked, and folders are left out.
    """
    job = masked_values(manifest.get("job", {}))
    head = (
        f"---\nlicense: {yaml(license_name or 'unknown')}\nlibrary_name: {_LIBRARY[to]}\ntags:\n- clip\n---\n"
    )
    use = _how_to_load(to, white=on_white(manifest))
    parts = [head, f"# {name}\n", _summary(job, manifest), _metrics(manifest), use]
    if job:
        parts.append(f"## Job file\n\n{_ABOUT_JOB}\n\n```toml\n{tomli_w.dumps(_of_the_model(job))}```\n")
    return "\n".join(part for part in parts if part)


def _summary(job: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    if not job:
        return "A CLIP, exported by Clipship from weights of another program.\n"
    model, optim, data = job["model"], job["optim"], job["data"]
    rows = {
        "model": _public(model["name"]),
        "text tower": _public(model.get("text")),
        "began with": _public(model.get("pretrained") or model.get("init") or "random weights"),
        "loss": optim["loss"],
        "steps": manifest.get("step"),
        "global batch": optim["global_batch_size"],
        "data": ", ".join(_public(list(data.get("train") or ()))) or data.get("format"),
        "transparent parts of pictures": "white" if on_white(manifest) else "dropped, as open_clip does",
    }
    lines = "".join(f"| {key} | {value} |\n" for key, value in rows.items() if value is not None)
    return f"A CLIP, trained and exported by Clipship.\n\n| | |\n|---|---|\n{lines}"


def _metrics(manifest: Mapping[str, Any]) -> str:
    metrics = manifest.get("metrics") or {}
    if not metrics:
        return ""
    lines = "".join(f"| {key} | {value:.6g} |\n" for key, value in metrics.items())
    about = "## Evaluation\n\nOf this checkpoint, on the held-out data of the job.\n"
    return f"{about}\n| metric | value |\n|---|---|\n{lines}"


def on_white(manifest: Mapping[str, Any]) -> bool:
    """Returns whether transparent parts of pictures were white in training."""
    return bool(manifest.get("job")) and manifest["job"]["data"].get("transparency") == "white"


def _how_to_load(to: str, *, white: bool) -> str:
    uses = own_table(__file__, "model_card.toml")
    picture = uses["picture"] + (uses["on_white"] if white else "")
    return f"## Use\n\n```python\n{uses[to].replace('PICTURE', picture)}\n```\n"


def _of_the_model(job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys that decide what was trained and differ from their defaults, without private paths.

    Where the run was, how it communicated and what it kept is nobody's business but its owner's.
    """
    table: dict[str, Any] = {"seed": job["seed"]} if job.get("seed") else {}
    for section in _SECTIONS:
        own = dict(_own(job.get(section) or {}, f"{section}."))
        table |= {section: own} if own else {}
    return table


def _own(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields the keys of a section that are set, and not to their defaults."""
    defaults = key_defaults()
    for key, value in section.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if nested := dict(_own(value, f"{name}.")):
                yield key, nested
        elif name not in _OF_THE_MACHINE and value is not None and _plain(defaults.get(name)) != value:
            yield key, _public(value)


def _plain(value: object) -> object:
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _public(value: Any) -> Any:
    """Returns a value without folders, hosts and commands: of a path only the file's name stays."""
    if isinstance(value, list | tuple):
        return [_public(each) for each in value]
    if not isinstance(value, str):
        return value
    if value.startswith("pipe:"):
        return "pipe:..."
    return value.rpartition("/")[2] if "://" in value or value.startswith(("/", "~")) else value
