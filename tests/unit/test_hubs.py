"""Hubs: names, downloads from servers on this machine, and what ranks that may not ask would lack."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from tests.support.command_line import problems
from tests.support.stub_hub import ModelScope, StubHub, stub_hub
from trainer.cli.main import main
from trainer.errors import InputError
from trainer.model.hub import hub_weights, model_folder

WEIGHTS = "open_clip_model.safetensors"
KEY = "model.pretrained"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    library = pytest.importorskip("modelscope_hub", reason="clipship[modelscope] is not installed")
    models = {}
    for revision in ("master", "v1.0"):
        folder = tmp_path / "hub" / revision
        folder.mkdir(parents=True)
        (folder / WEIGHTS).write_bytes(revision.encode() * 1000)
        (folder / "config.json").write_text("{}")
        (folder / "open_clip_config.json").write_text("about its images")
        models["org/clip", revision] = folder
    with stub_hub(ModelScope) as server:
        server.models.update(models)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.address)
        monkeypatch.setenv("HOME", str(tmp_path))
        library.set_default_config(library.HubConfig())  # it reads the variables once in a process
        yield server


@pytest.mark.parametrize(("name", "revision"), [("org/clip", "master"), ("org/clip@v1.0", "v1.0")])
def test_weights_of_a_revision_are_downloaded_once(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, revision: str
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


def test_a_model_that_is_not_there_or_has_no_weights_is_named(hub: StubHub, tmp_path: Path) -> None:
    with pytest.raises(InputError, match='ModelScope has no model "org/none"'):
        hub_weights(KEY, "modelscope:org/none", str(tmp_path))
    (tmp_path / "hub/master" / WEIGHTS).rename(tmp_path / "hub/master/model.safetensors")
    with pytest.raises(InputError, match="no weights in open_clip's form"):
        hub_weights(KEY, "modelscope:org/clip", str(tmp_path))
    with pytest.raises(InputError, match="has no vocabulary"):
        model_folder("modelscope:org/clip", str(tmp_path), {"tokenizer"})
    assert not (tmp_path / "models").exists(), "what nobody wants is not downloaded"


def test_a_tokenizer_of_modelscope_whose_download_was_cut_off_is_completed(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    with stub_hub() as server:
        server.models["org/small-bert"] = folder
        client = HfApi(server.address)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: client)
        download = partial(huggingface_hub.snapshot_download, endpoint=server.address)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
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


# What `clipship check` says of ranks that may not ask a hub


JOB = """
name = "of-a-hub"
[data]
format = "synthetic"
[model]
name = "ViT-B-32"
pretrained = "laion2b_s34b_b79k"
text = "hf:FacebookAI/roberta-base"
cache_dir = "{cache}"
[optim]
global_batch_size = 1024
steps = 800
[logging]
runs = "/shared/runs"
"""
SLURM = '[slurm]\ntime = "1:00:00"\n'
REPOSITORY = "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"
Capture = pytest.CaptureFixture[str]


def warned(job: Path, capsys: Capture, *arguments: str) -> str:
    """Returns what `clipship check` warns of, in one line, without looking at data."""
    assert main(["check", str(job), "--no-data", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return "\n".join(line for line in lines if "hub" in line and line.startswith("warning"))


def is_in(cache: Path, repository: str) -> None:
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "snapshots/0123").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("0123")


def test_what_no_cache_has_is_named_until_it_is_fetched(tmp_path: Path, capsys: Capture) -> None:
    job, cache = tmp_path / "job.toml", tmp_path / "weights"
    job.write_text(JOB.format(cache=cache) + SLURM)
    text = warned(job, capsys)
    assert (
        f"model.pretrained = laion2b_s34b_b79k ({REPOSITORY}), the text tower FacebookAI/roberta-base" in text
    )
    assert f"not in the cache ({cache})" in text
    assert "`clipship fetch JOB`" in text
    is_in(cache, "FacebookAI/roberta-base")
    assert warned(job, capsys).startswith(
        f"warning     model.pretrained = laion2b_s34b_b79k ({REPOSITORY}): "
    )
    is_in(cache, REPOSITORY)
    assert warned(job, capsys) == ""
    assert warned(job, capsys, "--set", f"model.cache_dir={tmp_path / 'gone/weights'}") == "", "not seen here"
    assert "of the teacher model.pretrained = openai" in warned(
        job, capsys, "--set", "model.teacher=ViT-B-16", "--set", "model.teacher_pretrained=openai"
    )
