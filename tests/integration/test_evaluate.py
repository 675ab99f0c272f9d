"""Evaluation by several ranks gives the metrics of one process and of open_clip itself.

`clipship eval` is tested from the command line.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from tests.support import pictures
from tests.support.evaluate_rank import CLASSES, TEMPLATES, measure
from tests.support.jobs import VIT, tiny_job
from tests.support.processes import ended_on_failure
from tests.support.runs import COMMAND, clipship
from tests.support.start import told
from trainer.comm.connect import connect
from trainer.config import Eval
from trainer.data.pack import PackedSample, write_shards
from trainer.data.pictures import decode
from trainer.data.source import open_labelled
from trainer.model.build import untrained
from trainer.world.launchers import World

NAME = Path(VIT).stem
SAMPLES = 83


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as shards with class and captions, as class folders and as two tables; and one digit alone.

    The captions of one table all differ; the other table has two images.
    """
    folder = tmp_path_factory.mktemp("evaluate")
    samples = [digit(number) for number in range(SAMPLES)]
    for kind, count in (("shards", SAMPLES), ("one", 1)):
        (folder / kind).mkdir()
        write_shards(samples[:count], folder / kind, 40)
    names = [Path("classes", members["cls"].decode(), f"{key}.png") for key, members in samples]
    for name, (_, members) in zip(names, samples, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(members["png"])
    rows = [
        f"{name},a {CLASSES[int(name.parent.name)]} of number {number * 7}"
        for number, name in enumerate(names[:40])
    ]
    (folder / "captions.csv").write_text("\n".join(["image,caption", *rows, f"{names[0]},one more caption"]))
    (folder / "two.csv").write_text(
        f"image,caption\n{names[0]},a zero\n{names[1]},a one\n{names[0]},none\n{names[1]},unity\n{names[1]},1"
    )
    return folder


def digit(number: int) -> PackedSample:
    """A real image of a digit, with captions that many others have too."""
    png, label = pictures.digit(number)
    captions = "\n".join(template.format(CLASSES[label]) for template in TEMPLATES[: 1 + number % 2])
    return f"{number:03d}", {"png": png, "txt": captions.encode(), "cls": str(label).encode()}


@pytest.fixture(scope="module")
def weights(folder: Path) -> Path:
    """A model that recognizes some of the digits.

    A linear map from its untrained image tower to the names is fitted to every other digit.
    """
    clip = untrained(tiny_job())
    network: Any = clip.model.eval()
    source = open_labelled(Eval(zero_shot=(str(folder / "shards" / "*.tar"),), class_names=CLASSES))
    raws = [source.read(number) for number in range(0, len(source), 2)]
    labels = torch.nn.functional.one_hot(torch.tensor([raw.label for raw in raws]), len(CLASSES)).float()
    with torch.no_grad():
        names = network.encode_text(clip.tokenizer([f"a {name}" for name in CLASSES]), normalize=True)
        projection, network.visual.proj = network.visual.proj, None
        pooled = network.visual(torch.stack([clip.eval_transform(decode(raw)) for raw in raws]))
        projection.copy_(
            torch.linalg.pinv(pooled, rtol=1e-3) @ labels @ torch.linalg.pinv(names.T, rtol=1e-4)
        )
        network.visual.proj = projection
    torch.save(network.state_dict(), folder / "weights.pt")
    return folder / "weights.pt"


@pytest.fixture(scope="module")
def alone(weights: Path, folder: Path) -> Iterator[list[Any]]:
    """Metrics of one process, which is the test itself and uses a thread for each core."""
    comm = connect(tiny_job(), World(0, 1, 0, 1, "here", "test"), os.environ)
    yield measure("torch", str(weights), folder, comm)
    comm.close()


def test_the_model_under_test_knows_something_but_not_all(alone: list[Any]) -> None:
    shards, folders, one = alone
    assert 0.3 < shards["zero_shot_top1"] < 1
    assert shards["zero_shot_top1"] < shards["zero_shot_top5"]
    assert {name: value for name, value in shards.items() if name.startswith("zero")} == {
        name: value for name, value in folders.items() if name.startswith("zero")
    }
    assert (shards["zero_shot_samples"], shards["retrieval_images"], shards["retrieval_texts"]) == (
        SAMPLES,
        SAMPLES,
        SAMPLES + SAMPLES // 2,
    )
    assert (folders["retrieval_images"], folders["retrieval_texts"]) == (2, 5)
    assert one["zero_shot_samples"] == 1


@pytest.mark.parametrize(
    ("backend", "count"), [("torch", 3), pytest.param("horovod", 2, marks=pytest.mark.horovod)]
)
def test_ranks_find_together_what_one_process_finds(
    alone: list[Any], weights: Path, folder: Path, backend: str, count: int
) -> None:
    words = (backend, str(weights), str(folder))
    assert told(backend, "clipship", count, "tests.support.evaluate_rank", *words) == [alone]


def with_open_clip(weights: Path, folder: Path) -> dict[str, float]:
    """Plain open_clip in one process, the whole matrix at once."""
    open_clip.add_model_config(VIT)
    clip, _, transform = open_clip.create_model_and_transforms(NAME, pretrained=str(weights))
    tokenizer = open_clip.get_tokenizer(NAME)
    clip.eval()

    def of_images(paths: list[Path]) -> torch.Tensor:
        features: torch.Tensor = clip.encode_image(
            torch.stack([transform(Image.open(path)) for path in paths]), normalize=True
        )
        return features

    paths = sorted((folder / "classes").rglob("*.png"))
    lines = [line.split(",") for line in (folder / "captions.csv").read_text().splitlines()[1:]]
    images = list(dict.fromkeys(image for image, _ in lines))
    owner = np.array([images.index(image) for image, _ in lines])
    with torch.no_grad():
        classes = torch.stack(
            [
                clip.encode_text(tokenizer([t.format(n) for t in TEMPLATES]), normalize=True).mean(0)
                for n in CLASSES
            ]
        )
        said = (of_images(paths) @ torch.nn.functional.normalize(classes, dim=1).T).argmax(1)
        cosines = (
            of_images([folder / image for image in images])
            @ clip.encode_text(tokenizer([text for _, text in lines]), normalize=True).T
        )
    of_texts = np.array(
        [min(np.flatnonzero(owner[order] == i)) for i, order in enumerate((-cosines).argsort(1).numpy())]
    )
    of_images_ = np.array(
        [int(np.flatnonzero(order == owner[t])[0]) for t, order in enumerate((-cosines.T).argsort(1).numpy())]
    )
    right = [int(place) == int(path.parent.name) for place, path in zip(said, paths, strict=True)]
    found = {"zero_shot_top1": sum(right) / len(right)}
    for name, places in (("i2t", of_texts), ("t2i", of_images_)):
        found |= {f"retrieval_{name}_r{k}": int((places < k).sum()) / len(places) for k in (1, 5, 10)}
        found[f"retrieval_{name}_median_rank"] = float(np.median(places + 1))
    return found


@pytest.fixture(scope="module")
def theirs(weights: Path, folder: Path) -> Path:
    """The same weights as open_clip_train leaves them: one file with the wrapper's prefix.

    The folder above it carries the model's name.
    """
    (folder / "logs" / "checkpoints").mkdir(parents=True)
    (folder / "logs" / "params.txt").write_text(f"logs: ./logs\nmodel: {VIT}\nname: mine\n")
    state = {f"module.{name}": tensor for name, tensor in torch.load(weights, weights_only=True).items()}
    content = {
        "epoch": 8,
        "name": "mine",
        "state_dict": state,
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]},
    }
    torch.save(content, folder / "logs" / "checkpoints" / "epoch_8.pt")
    return folder / "logs" / "checkpoints" / "epoch_8.pt"


def test_open_clip_itself_finds_the_same_of_a_checkpoint_of_open_clip_train(
    weights: Path, theirs: Path, folder: Path
) -> None:
    sets = ("--data", str(folder / "captions.csv"), "--zero-shot", str(folder / "classes"))
    words = folder / "words.txt", folder / "names.txt"
    for path, lines in zip(words, (TEMPLATES, CLASSES), strict=True):
        path.write_text("\n".join(lines))
    files = ("--templates", words[0], "--class-names", words[1])
    ran = clipship("eval", theirs, *sets, *files, "--nproc", "2")
    (line,) = ran.stdout.splitlines()
    found = json.loads(line)
    assert found["model"] == VIT
    assert found["world_size"] == 2
    expected = with_open_clip(weights, folder)
    assert {name: found[name] for name in expected} == expected
    assert "retrieval_i2t_r1" in ran.stderr


def test_eval_with_json_prints_one_object_and_no_table(weights: Path, folder: Path) -> None:
    ran = clipship("eval", weights, "--model", VIT, "--data", folder / "captions.csv", "--json")
    (line,) = ran.stdout.splitlines()
    assert {"checkpoint", "model", "retrieval_i2t_r1", "seconds"} <= json.loads(line).keys()
    assert "retrieval_i2t_r1" not in ran.stderr


def test_an_evaluation_that_is_asked_to_stop_leaves_with_75_and_blames_nobody(
    weights: Path, tmp_path: Path
) -> None:
    digits = [members for _, members in map(digit, range(SAMPLES))]
    write_shards(((f"{number:05d}", digits[number % SAMPLES]) for number in range(5000)), tmp_path, 5000)
    words = [str(weights), "--model", VIT, "--data", f"{tmp_path}/*.tar"]
    settings = ["--set", "eval.batch_size=1", "--set", "data.workers=0"]
    command = [*COMMAND, "eval", *words, *settings]
    with ended_on_failure(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as running:
        assert running.stderr is not None
        said = ""
        while "world" not in said:  # the ranks have met; from here on they have nothing to save
            line = running.stderr.readline()
            assert line, said
            said += line
        running.send_signal(signal.SIGTERM)
        said += running.stderr.read()
    assert running.returncode == 75, said
    assert re.search(
        r"clipship: asked to stop (in an evaluation|before there was anything to save; .*) \(exit code 75\)",
        said,
    )
    assert "late" not in said
