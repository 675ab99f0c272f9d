"""The metrics of a suite are those of CLIP_benchmark's formulas, written again here over whole matrices.

Both sides see the same features: a fixed projection of pictures of noise, and of each text what a test gives.
"""

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.metrics import balanced_accuracy_score, f1_score
from torch import Tensor, nn

from tests.support.jobs import tiny_job
from tests.support.thread_ranks import run_ranks
from trainer.data.pack import write_shards
from trainer.evaluate.suite import measure_suite
from trainer.model.build import Clip, untrained

CLASSES = 9
PICTURES = 64
Array = NDArray[np.float64]


class Projects(nn.Module):
    """A model with image features by a random projection, and text features by a table."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.projection = torch.randn(3 * side * side, 16, generator=torch.Generator().manual_seed(3))
        self.texts: dict[str, Array] = {}

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        return nn.functional.normalize(images.flatten(1) @ self.projection, dim=1)

    def encode_text(self, tokens: Tensor, normalize: bool = False) -> Tensor:
        rows = torch.tensor(np.array(list(self.texts.values())))
        return nn.functional.normalize(rows[tokens[:, 0]].float(), dim=1)

    def tokens(self, texts: Sequence[str]) -> Tensor:
        return torch.tensor([[list(self.texts).index(text)] for text in texts])


def projecting() -> tuple[Clip, Projects]:
    clip = untrained(tiny_job())
    side = clip.eval_transform(Image.new("RGB", (32, 32))).shape[-1]
    model = Projects(side)
    return replace(clip, model=model, tokenizer=model.tokens), model


def noise() -> list[bytes]:
    draw, files = np.random.default_rng(5), [io.BytesIO() for _ in range(PICTURES)]
    for file in files:
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "png")
    return [file.getvalue() for file in files]


def features(clip: Clip, pictures: Iterable[bytes]) -> Array:
    pixels = torch.stack([clip.eval_transform(Image.open(io.BytesIO(each))) for each in pictures])
    found: Array = clip.model.encode_image(pixels).double().numpy()  # type: ignore[operator]
    return found


def written(folder: Path, samples: Iterable[dict[str, bytes]]) -> None:
    (folder / "test").mkdir(parents=True)
    write_shards(((f"{n:03d}", members) for n, members in enumerate(samples)), folder / "test", 40)


def measured(root: Path, clip: Clip, name: str, ranks: int) -> dict[str, Any]:
    suite = {"names": (name,), "root": str(root)}
    job = tiny_job(eval={"batch_size": 10, "suite": suite}, data={"workers": 0, "max_bad_share": 0.1})
    results = [found for (found,) in run_ranks(ranks, lambda comm: measure_suite(clip, job, comm))]
    assert all({**each, "seconds": 0} == {**results[0], "seconds": 0} for each in results)
    return results[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_classification_equals_the_formulas_of_clip_benchmark(tmp_path: Path, ranks: int) -> None:
    """The classes have unequal numbers of pictures, and the last one has none."""
    pictures = noise()
    target = np.array([int(math.sqrt(number)) for number in range(PICTURES)])  # 1, 3, 5, ... of each class
    folder = tmp_path / "wds_vtab-pets_test"
    written(folder, ({"png": p, "cls": str(c).encode()} for p, c in zip(pictures, target, strict=True)))
    (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in "abcdefghi"))
    (folder / "zeroshot_classification_templates.txt").write_text("{c}\n")
    clip, model = projecting()
    images = features(clip, pictures)
    nearby = images[[(n * 7) % PICTURES for n in range(CLASSES)]]  # classes near some of the pictures
    model.texts = dict(zip("abcdefghi", nearby, strict=True))
    found = measured(tmp_path, clip, "vtab/pets", ranks)
    order = np.argsort(-(images @ nearby.T), axis=1, kind="stable")
    taken = order[:, 0]
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        balanced = balanced_accuracy_score(target, taken)
    assert found["metrics"] == pytest.approx(
        {
            "top1": np.mean(taken == target),
            "top5": np.mean([t in row[:5] for t, row in zip(target, order, strict=True)]),
            "mean_per_class_recall": balanced,
            "macro_f1": f1_score(target, taken, average="macro", labels=np.unique(target), zero_division=0),
        },
        abs=1e-6,
    )
    assert balanced != pytest.approx(found["metrics"]["top1"], abs=1e-3)
    assert (found["samples"], found["value"]) == (PICTURES, found["metrics"]["mean_per_class_recall"])


def captions_of(number: int, images: Array, model: Projects, count: int) -> list[str]:
    """Captions of a picture, whose features are somewhat near those of the picture."""
    draw, found = np.random.default_rng(number), [f"noise {number} and word {word}" for word in range(count)]
    for text in found:
        model.texts[text] = images[number] + 0.4 * draw.normal(size=16)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_choice_equals_the_formula_of_clip_benchmark(tmp_path: Path, ranks: int) -> None:
    """Each picture has two to four captions; one picture is broken."""
    pictures = noise()
    clip, model = projecting()
    images = features(clip, pictures)
    owned = [captions_of(n, images, model, 2 + n % 3) for n in range(PICTURES)]
    members = [{"png": p, "txt": "\n".join(t).encode()} for p, t in zip(pictures, owned, strict=True)]
    members[20]["png"] = b"broken"
    written(tmp_path / "wds_sugar_crepe-add_att", members)
    (tmp_path / "wds_sugar_crepe-add_att" / "dataset_type.txt").write_text("choice\n")
    right = []
    for number in (n for n in range(PICTURES) if n != 20):
        rows = np.array([model.texts[text] for text in owned[number]])
        right.append(int((rows @ images[number] / np.linalg.norm(rows, axis=1)).argmax()) == 0)
    assert 5 < sum(right) < len(right) - 5
    found = measured(tmp_path, clip, "sugar_crepe/add_att", ranks)
    assert (found["samples"], found["value"]) == (len(right), sum(right) / len(right))
    assert found["bad_samples"] == {"not an image": 1}
