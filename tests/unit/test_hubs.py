"""Names on hubs, and ModelScope's own client against a server on this machine."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from tests.support.command_line import problems
from tests.support.stub_hub import StubHub, stub_hub
from tests.support.stub_modelscope import StubModelScope, stub_modelscope
from trainer.errors import InputError
from trainer.model.hub import hub_weights, model_folder

WEIGHTS = "open_clip_model.safetensors"
KEY = "model.pretrained"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubModelScope]:
    library = pytest.importorskip("modelscope_hub", reason="clipship[modelscope] is not installed")
    models = {}
    for revision in ("master", "v1.0"):
        folder = tmp_path / "hub" / revision
        folder.mkdir(parents=True)
        (folder / WEIGHTS).write_bytes(revision.encode() * 1000)
        (folder / "config.json").write_text("{}")
        (folder / "open_clip_config.json").write_text("about its images")
        models["org/clip", revision] = folder
    with stub_modelscope(models) as server:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.address)
        monkeypatch.setenv("HOME", str(tmp_path))
        library.set_default_config(library.HubConfig())  # it reads the variables once in a process
        yield server


@pytest.mark.parametrize(("name", "revision"), [("org/clip", "master"), ("org/clip@v1.0", "v1.0")])
def test_weights_of_a_revision_are_downloaded_once(
    hub: StubModelScope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, revision: str
) -> None:
    file = hub_weights(KEY, f"modelscope:{name}", str(tmp_path / "cache"))
    assert file == tmp_path / f"cache/models/org--clip/snapshots/{revision}/{WEIGHTS}"
    assert file.read_bytes() == revision.encode() * 1000
    assert file.with_name("open_clip_config.json").read_text() == "about its images"
    assert not file.with_name("config.json").exists(), "only what is wanted is downloaded"
    before = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub_weights(KEY, f"modelscope:{name}", str(tmp_path / "cache")) == file
    assert len(hub.requests) == before


def test_a_model_that_is_not_there_or_has_no_weights_is_named(hub: StubModelScope, tmp_path: Path) -> None:
    with pytest.raises(InputError, match='ModelScope has no model "org/none"'):
        hub_weights(KEY, "modelscope:org/none", str(tmp_path))
    (tmp_path / "hub/master" / WEIGHTS).rename(tmp_path / "hub/master/model.safetensors")
    with pytest.raises(InputError, match="no weights in open_clip's form"):
        hub_weights(KEY, "modelscope:org/clip", str(tmp_path))
    with pytest.raises(InputError, match="has no vocabulary"):
        model_folder("modelscope:org/clip", str(tmp_path), {"tokenizer"})
    assert not (tmp_path / "models").exists(), "what nobody wants is not downloaded"


def test_a_tokenizer_of_modelscope_whose_download_was_cut_off_is_completed(
    hub: StubModelScope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "hub/master" / name).write_text("{}")
    hub.damage.add("merges.txt")
    with pytest.raises(Exception, match=r"merges\.txt"):
        model_folder("modelscope:org/clip", str(tmp_path), {"tokenizer"})
    (left,) = (tmp_path / "models").rglob("vocab.json")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="clipship fetch"):
        model_folder("modelscope:org/clip", str(tmp_path), {"tokenizer"})
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.damage.clear()
    assert model_folder("modelscope:org/clip", str(tmp_path), {"tokenizer"}) == left.parent
    assert (left.parent / "merges.txt").read_text() == "{}"


@pytest.fixture
def hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    folder = tmp_path / "bert"
    folder.mkdir()
    for name in ("config.json", "vocab.json", "merges.txt", "README.md"):
        (folder / name).write_text("{}")
    with stub_hub(org__small_bert=folder) as server:
        client = HfApi(server.address)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: client)
        monkeypatch.setattr(
            huggingface_hub,
            "snapshot_download",
            partial(huggingface_hub.snapshot_download, endpoint=server.address),
        )
        yield server


def test_a_hub_is_asked_once_though_nobody_wants_its_readme(hugging_face: StubHub, tmp_path: Path) -> None:
    folder = model_folder("hf:org/small-bert", str(tmp_path / "cache"), {"config", "tokenizer"})
    assert {file.name for file in folder.iterdir()} == {"config.json", "vocab.json", "merges.txt"}
    hugging_face.answers = False
    assert model_folder("hf:org/small-bert", str(tmp_path / "cache"), {"config", "tokenizer"}) == folder


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../x",
        "a/../b",
        "/etc",
        "a//b",
        "a/b/c",
        "a b",
        "a/b@",
        "a/b@../..",
        "a/b@x/../y",
        "a\n",
        "-?x",
        ".",
    ],
)
def test_what_is_no_name_on_a_hub_is_refused(name: str) -> None:
    for prefix in ("hf:", "modelscope:"):
        assert "names no model" in problems(model={"text": f"{prefix}{name}"})
        assert "names no model" in problems(model={"pretrained": f"{prefix}{name}"})
