"""Model card of an exported model: README.md as hubs show it. Imports no torch."""

from collections.abc import Mapping
from typing import Any

import tomli_w

from trainer.text.masking import masked_values

_LOADS = {
    "open_clip": """import open_clip

model, _, transform = open_clip.create_model_and_transforms("local-dir:FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")""",
    "hf": """from transformers import AutoModel, AutoProcessor

model = AutoModel.from_pretrained("FOLDER")
processor = AutoProcessor.from_pretrained("FOLDER")""",
    "onnx": """import onnxruntime

session = onnxruntime.InferenceSession("FOLDER/images.onnx")  # tokens.onnx is the text tower
features = session.run(None, {"images": pixels})[0]  # float32 [n, 3, height, width], normalised""",
    "safetensors": """from safetensors.torch import load_file

weights = load_file("FOLDER/model.safetensors")  # open_clip's names; model.json is its config""",
}
"""Lines of Python that load each form."""
_LIBRARY = {"open_clip": "open_clip", "hf": "transformers", "safetensors": "open_clip", "onnx": "onnx"}


def model_card(name: str, to: str, license_name: str, manifest: Mapping[str, Any]) -> str:
    """Returns the text of the card; `manifest` is that of the checkpoint, empty if it is not Clipship's.

    Secrets in the job are masked.
    """
    job = masked_values(manifest.get("job", {}))
    head = f"---\nlicense: {license_name or 'unknown'}\nlibrary_name: {_LIBRARY[to]}\ntags:\n- clip\n---\n"
    parts = [head, f"# {name}\n", _summary(job, manifest), _metrics(manifest), _how_to_load(to)]
    if job:
        parts.append(f"## Job file\n\n```toml\n{tomli_w.dumps(_set(job))}```\n")
    return "\n".join(part for part in parts if part)


def _summary(job: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    if not job:
        return "A CLIP, exported by Clipship from weights of another program.\n"
    model, optim, data = job["model"], job["optim"], job["data"]
    rows = {
        "model": model["name"],
        "text tower": model.get("text"),
        "began with": model.get("pretrained") or model.get("init") or "random weights",
        "loss": optim["loss"],
        "steps": manifest.get("step"),
        "global batch": optim["global_batch_size"],
        "data": ", ".join(data.get("train") or ()) or data.get("format"),
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


def _how_to_load(to: str) -> str:
    return f"## Use\n\n```python\n{_LOADS[to]}\n```\n"


def _set(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the table without keys that are not set, which TOML cannot hold."""
    return {
        key: _set(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }
