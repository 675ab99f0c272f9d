"""Data sets of a suite with known answers, and a model that sees nothing but the mean colour of a picture."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from tests.support.jobs import tiny_job
from tests.support.pictures import encoded
from trainer.config import Job
from trainer.data.pack import write_shards
from trainer.model.build import Clip, untrained

COLOURS = {"red": (250, 5, 5), "green": (5, 250, 5), "blue": (5, 5, 250), "white": (250, 250, 250)}


def suite_job(
    names: Any, root: Path | None = None, *folders: Path, on_bad_sample: str = "skip", **more: Any
) -> Job:
    """A job that asks for suites, in a folder of public data sets and in own ones."""
    suite = {"names": names, "folders": tuple(map(str, folders))}
    return tiny_job(
        eval={"batch_size": 4, **more, "suite": suite | ({"root": str(root)} if root else {})},
        data={"on_bad_sample": on_bad_sample},
    )


def picture(colour: str) -> bytes:
    """A picture of one colour, as PNG."""
    return encoded(Image.new("RGB", (32, 32), COLOURS[colour]))


def classification(folder: Path, samples: Iterable[tuple[str, int]], names: Sequence[str]) -> Path:
    """A data set in CLIP_benchmark's layout: pictures of a colour, each with a class number."""
    _shards(folder, [{"png": picture(colour), "cls": str(label).encode()} for colour, label in samples])
    (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in names))
    (folder / "zeroshot_classification_templates.txt").write_text("{c}\na photo of a {c} wall.\n")
    return folder


def captioned(folder: Path, samples: Iterable[tuple[str, str]]) -> Path:
    """A data set for retrieval: pictures of a colour, each with captions, one a line."""
    _shards(folder, [{"png": picture(colour), "txt": text.encode()} for colour, text in samples])
    (folder / "dataset_type.txt").write_text("retrieval\n")
    return folder


def class_folders(folder: Path, samples: Iterable[tuple[str, str]]) -> Path:
    """Pictures of a colour in a folder for each class."""
    for number, (colour, name) in enumerate(samples):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"{number}.png").write_bytes(picture(colour))
    return folder


def _shards(folder: Path, samples: Sequence[dict[str, bytes]]) -> None:
    (folder / "test").mkdir(parents=True)
    write_shards(((f"{number:03d}", members) for number, members in enumerate(samples)), folder / "test", 4)
    (folder / "test" / "nshards.txt").write_text(f"{-(-len(samples) // 4)}\n")


class SeesColours(nn.Module):
    """Image features are the mean colour, text features the colour whose name is in the text."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        return nn.functional.normalize(images.mean((2, 3)) * self.std + self.mean, dim=1)

    def encode_text(self, tokens: Tensor, normalize: bool = False) -> Tensor:
        return nn.functional.normalize(tokens.float(), dim=1)


def colour_of(text: str) -> tuple[int, int, int]:
    """The colour that a text names."""
    return next(COLOURS[name] for name in COLOURS if name in text)


def tokens(texts: Sequence[str]) -> Tensor:
    """Tokens of `SeesColours`: the colour's three bytes, int64 [n, 3]."""
    return torch.tensor([colour_of(text) for text in texts])


def colour_clip() -> Clip:
    """`SeesColours` with the transform of a tiny model."""
    clip = untrained(tiny_job())
    return replace(clip, model=SeesColours(clip.mean, clip.std), tokenizer=tokens)
