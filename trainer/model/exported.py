"""A trained model that is being exported, and the folder that it is written into."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from trainer.config import Job
from trainer.model.build import Clip
from trainer.model.image_tokens import image_tokens
from trainer.model.open_clip_api import of_budget
from trainer.model.text_tower import TextTower
from trainer.run.checkpoints import MODEL_CONFIG
from trainer.safe_io.atomic import replacing

OPEN_CLIP_WEIGHTS = "open_clip_model.safetensors"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Export:
    """A trained model that is being exported."""

    job: Job
    clip: Clip
    folder: Path
    to: str
    """Name of the form."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's parameters and buffers by open_clip's names."""
        return {name: tensor.contiguous() for name, tensor in self.clip.model.state_dict().items()}

    @property
    def config(self) -> dict[str, Any]:
        """The model's config in open_clip's format, with what the job has changed."""
        config: dict[str, Any] = json.loads(self.clip.files[MODEL_CONFIG])
        for part, changes in self.job.model.tower_changes.items():
            config[part] = {**config[part], **changes}
        config["vision_cfg"].pop("patch_dropout", None)
        if tokens := image_tokens(self.job.model, config):
            config["vision_cfg"] |= of_budget(tokens)
        if getattr(self.clip.model, "logit_bias", None) is not None:
            config["init_logit_bias"] = -10
        if isinstance(self.text, TextTower):
            config["custom_text"] = True
        config["text_cfg"] = self._text_config(config["text_cfg"])
        return config

    @property
    def text(self) -> Any:
        """The text tower; None if it is a part of the model itself, as in OpenAI's CLIP."""
        return getattr(self.clip.model, "text", None)

    def _text_config(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the text_cfg; a tower or tokenizer that came from a folder is found in the exported one."""
        here = os.path.abspath(self.folder)
        places = {name: text[name] for name in ("hf_model_name", "hf_tokenizer_name") if name in text}
        return {
            **text,
            **{name: here if str(place).startswith("/") else place for name, place in places.items()},
        }

    def write(self, name: str, content: Any) -> None:
        """Writes an object as JSON."""
        write_json_to(self.folder / name, content)

    def write_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Writes tensors as safetensors, which others may read: its own writer lets only the owner."""
        with replacing(self.folder / name) as file:
            file.write(save(dict(weights), metadata={"format": "pt"}))


def write_json_to(path: Path, content: Any) -> None:
    """Writes an object as JSON."""
    text = json.dumps(content, indent=2, ensure_ascii=False, default=list) + "\n"
    path.write_text(text, encoding="utf-8")
