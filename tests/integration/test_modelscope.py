"""ModelScope as a hub: its own client against a server on this machine that answers as ModelScope does."""

import json
from collections.abc import Iterator
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import save_file

from tests.support.hub_jobs import Clipship, Done, clipship_at, write_hub_job
from tests.support.jobs import VIT
from tests.support.stub_hub import ModelScope, StubHub, stub_hub
from tests.support.text_towers import make_tower

WEIGHTS = "open_clip_model.safetensors"
CLIP = 'pretrained = "modelscope:org/clip"'


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StubHub, Clipship]]:
    with stub_hub(ModelScope) as hub:
        variables = {"MODELSCOPE_ENDPOINT": hub.address, "HF_ENDPOINT": "http://127.0.0.1:9"}
        with clipship_at(tmp_path_factory.mktemp("home"), variables) as clipship:
            yield hub, clipship


@pytest.fixture
def hub(started: tuple[StubHub, Clipship], tmp_path: Path) -> StubHub:
    hub, _ = started
    hub.forget()
    for revision, seed in (("master", 1), ("v1.0", 2)):
        folder = tmp_path / "hub" / revision
        folder.mkdir(parents=True)
        torch.manual_seed(seed)
        save_file(_model().state_dict(), folder / WEIGHTS)
        (folder / "configuration.json").write_text("{}")
        hub.models["org/clip", revision] = folder
    hub.models["org/small-bert", "master"] = make_tower(tmp_path / "bert")
    return hub


@pytest.fixture
def clipship(started: tuple[StubHub, Clipship], tmp_path: Path) -> Clipship:
    """Runs a command, without learning: what a run saves is what it was given."""

    def run(*words: str | Path, code: int = 0) -> Done:
        return started[1](*words, "--set", "optim.lr=1e-30", cwd=tmp_path, code=code)

    return run


def _model() -> torch.nn.Module:
    config = json.loads(Path(VIT).read_text(encoding="utf-8"))
    sizes = {key: config[key] for key in ("embed_dim", "vision_cfg", "text_cfg")}
    model: torch.nn.Module = open_clip.model.CLIP(**sizes)
    return model


@pytest.mark.parametrize(("name", "revision"), [("org/clip", "master"), ("org/clip@v1.0", "v1.0")])
def test_weights_of_a_revision_are_fetched_once_and_train_without_a_hub(
    hub: StubHub, clipship: Clipship, tmp_path: Path, name: str, revision: str
) -> None:
    job = write_hub_job(tmp_path, f'pretrained = "modelscope:{name}"')
    done = clipship("fetch", job)
    file = tmp_path / f"cache/models/org--clip/snapshots/{revision}/{WEIGHTS}"
    assert done.stdout == f"weights modelscope:{name}  {file.stat().st_size:,}  {file}\n"
    assert file.read_bytes() == (tmp_path / "hub" / revision / WEIGHTS).read_bytes()
    assert not file.with_name("configuration.json").exists()
    before = len(hub.requests)
    clipship("run", job, "--set", "model.offline=true")
    assert len(hub.requests) == before
    kept = torch.load(next((tmp_path / "runs").glob("*/checkpoints/step-*/model.pt")))
    torch.manual_seed(1 if revision == "master" else 2)
    assert torch.allclose(kept["visual.proj"], _model().state_dict()["visual.proj"])


def test_a_text_tower_comes_from_modelscope_too(hub: StubHub, clipship: Clipship, tmp_path: Path) -> None:
    job = write_hub_job(tmp_path, 'text = "modelscope:org/small-bert"')
    done = clipship("fetch", job)
    assert [line.partition("  ")[0] for line in done.stdout.splitlines()] == [
        "text tower modelscope:org/small-bert",
        "tokenizer modelscope:org/small-bert",
    ]
    clipship("run", job, "--set", "model.offline=true")


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("org/none", 2, 'ModelScope has no model "org/none"'),
        ("org/small-bert", 2, "has no weights in open_clip's form"),
        ("org/clip@../../x", 2, "names no model"),
    ],
)
def test_what_modelscope_does_not_have_is_said_in_a_sentence(
    hub: StubHub, clipship: Clipship, tmp_path: Path, name: str, code: int, said: str
) -> None:
    done = clipship("fetch", write_hub_job(tmp_path, f'pretrained = "modelscope:{name}"'), code=code)
    assert done.stdout == ""
    assert said in done.stderr


def test_damaged_weights_are_neither_kept_nor_used(hub: StubHub, clipship: Clipship, tmp_path: Path) -> None:
    hub.damage.add(WEIGHTS)
    done = clipship("fetch", write_hub_job(tmp_path, CLIP), code=2)
    assert done.stdout == ""
    assert not list((tmp_path / "cache").rglob(WEIGHTS))
