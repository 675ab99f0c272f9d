"""`clipship fetch` against a hub on this machine, by HTTP: what it downloads, cut off, damaged, not there."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.support.hub_jobs import Clipship, clipship_at, write_hub_job
from tests.support.jobs import VIT
from tests.support.stub_hub import StubHub, stub_hub
from tests.support.text_towers import make_tower


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StubHub, Clipship]]:
    with stub_hub() as hub:
        variables = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1"}
        with clipship_at(tmp_path_factory.mktemp("home"), variables) as clipship:
            yield hub, clipship


@pytest.fixture
def hub(started: tuple[StubHub, Clipship], tmp_path: Path) -> StubHub:
    hub, _ = started
    hub.forget()
    hub.models["org/small-bert"] = make_tower(tmp_path / "bert")
    (tmp_path / "bert" / "README.md").write_text("what nobody fetches is in every model on the hub")
    return hub


@pytest.fixture
def clipship(started: tuple[StubHub, Clipship], tmp_path: Path) -> Clipship:
    return partial(started[1], cwd=tmp_path)


def write_job(folder: Path, *more: str) -> Path:
    return write_hub_job(folder, 'text = "hf:org/small-bert"', *more)


def test_what_was_fetched_trains_while_no_hub_answers(
    hub: StubHub, clipship: Clipship, tmp_path: Path
) -> None:
    job = write_job(tmp_path)
    done = clipship("fetch", job)
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "text tower org/small-bert",
        "tokenizer org/small-bert",
    ]
    assert f"{tmp_path}/cache/" in lines[0]
    hub.answers = False
    before = len(hub.requests)
    again = clipship("fetch", job)
    assert again.stdout == done.stdout
    clipship("run", job)
    assert len(hub.requests) == before


def test_timms_weights_of_an_image_tower_are_fetched_too(
    hub: StubHub, clipship: Clipship, tmp_path: Path
) -> None:
    tower = tmp_path / "tower"
    tower.mkdir()
    weights = timm.create_model("resnet10t").state_dict()
    save_file(weights, tower / "model.safetensors", metadata={"format": "pt"})
    hub.models["timm/resnet10t.c3_in1k"] = tower
    config = json.loads(Path(VIT).read_text(encoding="utf-8"))
    image = {"timm_model_name": "resnet10t", "timm_pool": "avg", "timm_proj": "linear", "image_size": 32}
    (tmp_path / "resnet.json").write_text(json.dumps({**config, "vision_cfg": image}))
    job = write_job(tmp_path, 'init = "timm"')
    job.write_text(job.read_text().replace(VIT, "resnet.json"))
    done = clipship("fetch", job)
    assert done.stdout.splitlines()[0].startswith("image tower timm/resnet10t.c3_in1k  ")
    hub.answers = False
    clipship("run", job, "--set", "optim.lr=1e-30", HF_HUB_OFFLINE="1")
    kept = torch.load(next((tmp_path / "runs").glob("*/checkpoints/step-*/model.pt")))
    assert torch.allclose(kept["visual.trunk.conv1.0.weight"], weights["conv1.0.weight"])


def test_a_download_that_was_cut_off_goes_on(hub: StubHub, clipship: Clipship, tmp_path: Path) -> None:
    job, weights = write_job(tmp_path), tmp_path / "bert" / "model.safetensors"
    hub.cut["model.safetensors"] = 1000
    done = clipship("fetch", job, code=None)
    if done.returncode:
        assert "clipship: " in done.stderr
        clipship("fetch", job)
    (copy,) = (tmp_path / "cache").rglob("snapshots/*/model.safetensors")
    assert copy.read_bytes() == weights.read_bytes()


def test_a_damaged_download_is_refused_and_removed(hub: StubHub, clipship: Clipship, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    hub.damage.add("model.safetensors")
    done = clipship("fetch", job, code=1)
    assert "model.safetensors: its checksum differs from the hub's" in done.stderr
    assert not list((tmp_path / "cache").rglob("snapshots/*/model.safetensors"))
    hub.damage.clear()
    clipship("fetch", job)


@pytest.mark.parametrize(
    ("answers", "code", "words"), [(True, 2, "org/no-such"), (False, 1, "Hugging Face hub does not answer")]
)
def test_a_model_that_is_not_there_and_a_hub_that_is_silent_differ(
    hub: StubHub, clipship: Clipship, tmp_path: Path, answers: bool, code: int, words: str
) -> None:
    job = write_job(tmp_path)
    job.write_text(job.read_text().replace("org/small-bert", "org/no-such"))
    hub.answers = answers
    done = clipship("fetch", job, code=code)
    assert words in done.stderr


def test_a_start_that_may_not_ask_says_what_to_do(hub: StubHub, clipship: Clipship, tmp_path: Path) -> None:
    job = write_job(tmp_path, "offline = true")
    done = clipship("run", job, code=2)
    assert "clipship fetch" in done.stdout + done.stderr
    assert hub.requests == []


def test_a_job_that_names_nothing_on_a_hub_needs_no_fetch(
    hub: StubHub, clipship: Clipship, tmp_path: Path
) -> None:
    job = write_job(tmp_path)
    job.write_text(job.read_text().replace('text = "hf:org/small-bert"\n', ""))
    done = clipship("fetch", job)
    assert done.stdout == ""
    assert "names nothing on a hub" in done.stderr
