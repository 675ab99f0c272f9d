"""`clipship check`: files, tables, models and the run folder of a job are checked before anything starts."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.support.check import found, problems
from tests.support.loading import refusal
from tests.support.pictures import picture
from trainer.config.loader import dump_job, load_job
from trainer.data.pack import write_shard
from trainer.data.shard_names import expand_shards
from trainer.errors import InputError, StorageError
from trainer.evaluate.template_sets import imagenet_words
from trainer.run.folder import check_run_folder

JOB = 'name = "run"\n[data]\ntrain = "*.tar"\n[optim]\nglobal_batch_size = 4\nsteps = 2\n'
RUN = "runs/run"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: three shards of a sample and a job file over them."""
    monkeypatch.chdir(tmp_path)
    for number in (1, 2, 10):
        write_shard([("k", {"png": picture(1), "txt": b"text"})], tmp_path / f"s-{number}.tar")
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def said(folder: Path, *overrides: str, options: tuple[str, ...] = ()) -> str:
    """The problems of the folder's job with other values, "" if there are none."""
    return problems(folder / "job.toml", *(f"--set={each}" for each in overrides), *options)


def made_run(folder: Path, *folders: str) -> Path:
    """Makes the job's run folder as its first start leaves it, with these folders in it."""
    for name in ("", *folders):
        (folder / RUN / name).mkdir(parents=True, exist_ok=True)
    (folder / RUN / "job.toml").write_text(dump_job(load_job(folder / "job.toml", ())))
    return folder / RUN


def refused(*patterns: str) -> str:
    with pytest.raises(InputError) as caught:
        expand_shards(patterns)
    return str(caught.value)


def test_globs_in_addresses_are_asked_of_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    for number in (10, 9, 1):
        files.pipe(f"/globs/s-{number}.tar", b"x")
    shards = [f"memory:///globs/s-{number}.tar" for number in (1, 9, 10)]
    assert expand_shards(["memory://globs/s-*.tar"]) == shards
    files.pipe("/globs/s-2.tar", b"x")
    assert expand_shards(["memory://globs/s-*.tar"]) == shards, "a process lists once"
    assert refused("memory://globs/t-*.tar") == "memory://globs/t-*.tar: no file matches"
    assert "http://b/a/*.tar: a web server does not list its files" in refused("http://b/{a,b}/*.tar")
    monkeypatch.setattr("trainer.data.files.STORE_WAITS_S", ())
    monkeypatch.setattr("trainer.data.shard_names.file_system", lambda pattern: 1 / 0)
    with pytest.raises(StorageError, match=r"memory://globs/\?.tar: cannot be read"):
        expand_shards(["memory://globs/?.tar"])


@pytest.mark.parametrize("name", ["a[1]", "b{2}", "c*", "d,e", "f\\g", "h i"])
def test_a_job_in_a_folder_with_special_characters_finds_its_shards(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "x.tar").touch()
    (folder / "job.toml").write_text(JOB)
    for pattern in ("x.tar", "*.tar", "{x..x}.tar"):
        job = load_job(folder / "job.toml", (f"data.train='{pattern}'",))
        assert expand_shards(job.data.train) == [f"{folder}/x.tar"]
    (tmp_path / "a[1].tar").touch()
    assert expand_shards([f"{tmp_path}/a[1].tar"]) == [f"{tmp_path}/a[1].tar"], "if there is one"


HOLDS = "the folder {folder} holds job.toml, s-1.tar, s-2.tar and 1 more"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("{folder}/*.csv", f"{{folder}}/*.csv: no file matches; {HOLDS}"),
        ("{folder}/no/*.tar", "{folder}/no/*.tar: no file matches; there is no folder {folder}/no"),
        ("{folder}/empty/*.tar", "the folder {folder}/empty is empty"),
        ("{folder}/a.tar", "{folder}/a.tar: no such file; the folder {folder} holds"),
        ("{folder}/s-{{0..9}}.tar", "8 of 10 files are missing: s-0.tar, s-3.tar, s-4.tar and 5 more; the "),
        ("{folder}", "{folder} is a folder: name the files, for example {folder}/*.tar"),
        ("{folder}/s-{{1", "cannot expand its braces"),
        ("{folder}/{{0..99999999999}}", "stand for 100,000,000,000 names; at most 1,000,000 are allowed"),
        (" ", "an empty pattern names no file"),
    ],
)
def test_a_pattern_that_finds_nothing_says_where_it_looked_and_what_is_there(
    folder: Path, pattern: str, expected: str
) -> None:
    if "empty/" in pattern:
        (folder / "empty").mkdir()
    assert expected.format(folder=folder) in refused(pattern.format(folder=folder))


def test_a_command_of_a_stream_runs_as_it_is_written() -> None:
    for command in (r"sed 's/\.tar$/\n/'", r"grep '\{2,3\}'", r"printf 'a\\b'", "cat a \\\n b", "a\\"):
        assert expand_shards([f"pipe:{command}"]) == [f"pipe:{command}"]
    for command in (r'awk "{print \$1}" x', r'f() { echo "\$1"; }; f x.tar', r'python -c "d={\"a\":1}"'):
        assert expand_shards([f"pipe:{command}"]) == [f"pipe:{command}"]
    assert expand_shards([r"pipe:x a{b\,c,d}"]) == [r"pipe:x ab\,c", "pipe:x ad"]
    assert expand_shards([r"pipe:cat {a,b}\ c.tar"]) == [r"pipe:cat a\ c.tar", r"pipe:cat b\ c.tar"]


def test_a_shard_by_two_names_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "s-2.tar: named more than once" in refused(f"{folder}/*.tar", f"{folder}/s-2.tar")
    (tmp_path / "file.tar").symlink_to(folder / "s-2.tar")
    (tmp_path / "folder").symlink_to(folder)
    name = f"{folder}/s-2.tar"
    for other in (
        f"{folder}//s-2.tar",
        f"{folder}/./s-2.tar",
        f"{folder}/../{folder.name}/s-2.tar",
        os.path.relpath(name),
        f"{tmp_path}/file.tar",
        f"{tmp_path}/folder/s-2.tar",
    ):
        assert f"{name} = {other}: named more than once" in refused(name, other)
        assert expand_shards([other]) == [other]


CONFIG = {"embed_dim": 1, "vision_cfg": {}, "text_cfg": {}, "multimodal_cfg": {}}
COCA = "model.name=coca_ViT-B-32"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.name=ViT-B32"], "did you mean ViT-B-32"),
        (["model.name=vit-b-16-siglip"], "did you mean ViT-B-16-SigLIP"),
        (["model.name=resnet50"], "RN50"),
        (["model.name='0'"], "for example"),
        (["model.name=FOLDER/none.json"], "no such config file"),
        (["model.name=FOLDER/broken.json"], "is not JSON"),
        (["model.name=FOLDER/short.json"], "lacks vision_cfg, text_cfg"),
        (["model.name=FOLDER/list.json"], "lacks embed_dim, vision_cfg"),
        (["model.name=local-dir:FOLDER/none"], "contains no open_clip_config.json"),
        (["model.pretrained=FOLDER/w.pt"], "no weights file"),
        (["model.pretrained=laion2b_s34b_b79"], "laion2b_s34b_b79k"),
        (["model.name=ViT-B/32", "model.pretrained=Openia"], "openai"),
        (["model.name=RN50", "model.pretrained='0'"], "it has cc12m, openai"),
        (["model.name=ViT-S-32-alt", "model.pretrained=any"], "open_clip has no weights for ViT-S-32-alt"),
        (["model.name=local-dir:FOLDER", "model.pretrained=openai"], "has its own weights and none called"),
        ([COCA], "coca_ViT-B-32 also writes captions (CoCa)"),
        (["optim.loss=coca"], "ViT-B-32 writes no captions"),
        ([COCA, "optim.loss=coca", "model.lock_text=true"], "model.lock_text: coca_ViT-B-32 writes captions"),
        ([COCA, "optim.loss=coca", "model.cuda_graphs=true"], "cannot be captured one by one"),
        ([COCA, "optim.loss=coca", "model.lora_rank=2", "model.pretrained=s-1.tar"], "locked one by one"),
        (["model.name=FOLDER/mine.json"], "mine.json also writes captions"),
        (["model.name=local-dir:FOLDER"], "also writes captions"),
        (["model.pretrained=OpenAI"], ""),
        (["model.name=ViT-B/32", "model.pretrained=openai"], ""),
        (["model.name=ViT-B-32-quickgelu", "model.pretrained=openai"], ""),
        (["model.pretrained=laion2b_s34b_b79k"], ""),
        (["model.name=hf-hub:org/model"], ""),
        ([COCA, "optim.loss=coca"], ""),
    ],
)
def test_models_tags_and_losses_are_taken_or_refused_with_what_is_near(
    folder: Path, overrides: list[str], expected: str
) -> None:
    for name, content in (
        ("broken.json", "{"),
        ("short.json", '{"embed_dim": 1}'),
        ("list.json", "[]"),
        ("mine.json", json.dumps(CONFIG)),
        ("open_clip_config.json", json.dumps({"model_cfg": CONFIG})),
    ):
        (folder / name).write_text(content)
    text = said(folder, *(each.replace("FOLDER", str(folder)) for each in overrides))
    assert expected in text
    assert bool(text) == bool(expected)


def evaluation(folder: Path, **values: object) -> str:
    """The problems of a job with an evaluation on class names."""
    keys = {"zero_shot": [f"{folder}/*.tar"], "class_names": ["cat", "dog"], **values}
    return said(folder, *(f"eval.{key}={json.dumps(value)}" for key, value in keys.items()))


@pytest.mark.parametrize(
    ("key", "content", "expected"),
    [
        ("class_names", "cat\ndog \n\n", ""),
        ("class_names", "cat\n\ndog\n", "names.txt:2: this line is empty"),
        ("class_names", "", "names.txt:1: this line is empty"),
        ("class_names", None, "cannot be read (No such file or directory)"),
        ("templates", "a {}\na photo\n", "names.txt:2: this template has no {}"),
        ("templates", "a {}\na {style} {}\n", "names.txt:2: a template has the class name once"),
    ],
)
def test_a_bad_file_of_lines_is_named_with_its_line(
    folder: Path, key: str, content: str | None, expected: str
) -> None:
    if content is not None:
        (folder / "names.txt").write_text(content)
    text = evaluation(folder, **{key: str(folder / "names.txt")})
    assert expected in text
    assert text == "" if not expected else f"eval.{key}: " in text


def test_words_of_a_set_are_known_by_name_and_left_to_the_ranks_without_open_clip(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = evaluation(folder, class_names="set:imagnet")
    assert 'eval.class_names: there is no set called "imagnet"; there are imagenet' in text
    for installed in (True, False):
        imagenet_words.cache_clear()
        if not installed:
            monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        assert evaluation(folder, class_names="set:imagenet", templates="set:imagenet") == ""
    imagenet_words.cache_clear()


def test_a_run_folder_without_a_step_may_be_used_by_another_job(folder: Path) -> None:
    (made_run(folder, "logs") / "metrics.jsonl").touch()
    other = (folder / "job.toml", "--set=optim.lr=0.25")
    assert "did no step: this one takes its place" in str(found(*other))
    assert "did no step" not in str(found(folder / "job.toml"))
    (folder / RUN / "checkpoints/step-00000001").mkdir(parents=True)
    assert "optim.lr is 0.0005 there" in problems(*other)


def test_a_run_that_went_back_and_saved_again_no_longer_needs_that_checkpoint(folder: Path) -> None:
    gone = f"{folder}/step-00000012"
    resume = f"checkpoint.resume={gone}"
    assert "there is no checkpoint at" in said(folder, resume)
    run = made_run(folder)
    for step, asked in ((12, "auto"), (14, gone)):
        saved = run / f"checkpoints/step-{step:08d}"
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text(json.dumps({"job": {"checkpoint": {"resume": asked}}}))
    assert said(folder, resume) == ""
    assert "there is no checkpoint at" in said(folder, f"{resume}3")
    (run / "checkpoints/step-00000016").mkdir()
    (run / "checkpoints/step-00000016/manifest.json").write_text('{"job": {"checkp')
    assert said(folder, resume) == ""


@pytest.mark.parametrize(
    ("name", "expected"), [("notes.txt", "so it is not a run"), ("job.toml", "cannot be read")]
)
def test_a_run_folder_that_holds_something_else_is_left_alone(folder: Path, name: str, expected: str) -> None:
    (folder / RUN).mkdir(parents=True)
    (folder / RUN / name).write_text("x")
    assert expected in said(folder)


def test_a_run_folder_below_a_file_is_refused(folder: Path) -> None:
    assert "is a file" in said(folder, "logging.runs=s-1.tar")
    assert "is a file" in said(folder, "logging.runs=.", "name=s-1.tar")


@pytest.fixture
def _without_roots_rights() -> Iterator[None]:
    """Root may write anywhere: the test goes on as nobody, and root's rights come back after it."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    yield
    os.setresuid(0, 0, 0)


def test_a_run_folder_without_permission_is_refused(folder: Path, request: pytest.FixtureRequest) -> None:
    (folder / "runs").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    job = load_job(folder / "job.toml", ())
    request.getfixturevalue("_without_roots_rights")
    assert "no permission to write" in refusal(check_run_folder, job)


def test_all_problems_of_a_job_are_reported_together(folder: Path) -> None:
    wrong = ("data.train=['no.tar', 'none.tar']", "model.name=ViT-B-3", "model.pretrained=no.pt")
    text = said(folder, *wrong, "logging.runs=s-1.tar", "optim.global_batch_size=5", options=("--nproc", "2"))
    keys = [
        "data.train:",
        "data.train:",
        "optim.global_batch_size",
        "model.name:",
        "model.pretrained:",
        "run",
    ]
    assert [line.split(" ")[0] for line in text.removeprefix("clipship: ").splitlines()] == keys
