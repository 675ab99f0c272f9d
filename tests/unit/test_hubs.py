"""Hubs: names, downloads from servers on this machine, and what ranks that may not ask would lack."""

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from tests.support.command_line import problems
from tests.support.jobs import tiny_job
from tests.support.stub_hub import ModelScope, StubHub, stub_hub
from trainer.cli.main import main
from trainer.errors import InputError, MachineError
from trainer.launch import local
from trainer.model.compile import keep_kernels
from trainer.model.hub import hub_weights, model_folder
from trainer.sysinfo import user_cache

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


# Folders on the node's own disk: only one that this user alone can enter is used.


def own(disk: Path) -> Path:
    return disk / f"clipship-{os.geteuid()}"


def test_the_folder_is_made_for_this_user_alone_and_found_again(tmp_path: Path) -> None:
    folder = user_cache.node_cache("kernels", (tmp_path,))
    assert folder == own(tmp_path) / "kernels"
    assert own(tmp_path).stat().st_mode & 0o777 == 0o700
    assert user_cache.node_cache("kernels", (tmp_path,)) == folder


@pytest.mark.parametrize("trap", ["link", "file", "open", "missing disk"])
def test_a_folder_that_another_may_have_made_is_passed_over(tmp_path: Path, trap: str) -> None:
    bad, good, elsewhere = (tmp_path / name for name in ("bad", "good", "elsewhere"))
    good.mkdir()
    elsewhere.mkdir(mode=0o700)
    if trap != "missing disk":
        bad.mkdir()
    if trap == "link":
        own(bad).symlink_to(elsewhere)
    elif trap == "file":
        own(bad).touch()
    elif trap == "open":
        own(bad).mkdir()
        own(bad).chmod(0o777)
    assert user_cache.node_cache("kernels", (bad, good)) == own(good) / "kernels"
    assert user_cache.node_cache("kernels", (bad,)) is None
    assert list(elsewhere.iterdir()) == []


def test_the_folder_of_temporary_files_is_looked_for_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    looked_in: list[str] = []
    private = user_cache.private_folder

    def elsewhere(place: Path) -> Path:
        if place == Path("/var/tmp"):
            raise PermissionError(place)
        return private(place)

    monkeypatch.setattr(user_cache, "private_folder", elsewhere)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: looked_in)
    assert user_cache.node_cache("kernels") is None
    looked_in.append(str(tmp_path))
    assert user_cache.node_cache("kernels") == own(tmp_path) / "kernels"


def test_a_machine_without_a_folder_for_temporary_files_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(MachineError, match=r"no temporary folder can be made.*TMPDIR"):
        local.start_ranks(["true"], tiny_job(), nproc=1, hosts=None)


def test_kernels_are_kept_there_unless_the_environment_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_cache = user_cache.node_cache
    monkeypatch.setattr("trainer.model.compile.node_cache", lambda name: node_cache(name, (tmp_path,)))
    env: dict[str, str] = {}
    folder = own(tmp_path) / "kernels"
    assert keep_kernels(env) == str(folder)
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    assert env == kept
    given = {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}
    assert keep_kernels(given) == "/elsewhere"
    assert given == {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}


@pytest.mark.parametrize("trap", ["link", "open", "no home"])
def test_a_cache_in_which_others_may_write_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folder = user_cache.user_cache("search")
    assert folder == tmp_path / ".cache" / "clipship" / "search"
    folder.mkdir(mode=0o700, parents=True)
    assert user_cache.user_cache("search") == folder
    if trap == "link":
        folder.rename(tmp_path / "other")
        folder.symlink_to(tmp_path / "other")
    elif trap == "open":
        folder.chmod(0o777)
    else:
        monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    assert user_cache.user_cache("search") is None
