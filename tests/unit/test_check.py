"""`clipship check`: files, tables, models and the run folder of a job are checked before anything starts."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.support.refusals import refusal
from trainer.config import Data, Eval, Job
from trainer.config.loader import dump_job, load_job
from trainer.data.check import check_data
from trainer.data.sample_counts import recorded_sizes
from trainer.data.shard_files import write_shard
from trainer.data.shard_names import expand_shards
from trainer.errors import InputError, StorageError
from trainer.evaluate.inputs import check_evaluation, class_names, templates
from trainer.evaluate.template_sets import imagenet_words
from trainer.model.catalog import check_model, check_pretrained, check_tag, known_models
from trainer.model.packages import check_loss
from trainer.model.tags import clean_tag, known_tags
from trainer.plan.check import check_job, check_without_files
from trainer.run.folder import check_run_folder, run_folder, used_again

JOB = 'name = "run"\n[data]\ntrain = "*.tar"\n[optim]\nglobal_batch_size = 4\nsteps = 2\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three empty shards and a job file over them."""
    for number in (1, 2, 10):
        write_shard([("k", {"png": b"png", "txt": b"text"})], tmp_path / f"s-{number}.tar")
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def job_in(folder: Path, *overrides: str) -> Job:
    return load_job(folder / "job.toml", overrides)


def made_run(job: Job, *folders: str) -> Path:
    """Makes the job's run folder as its first start leaves it, with these folders in it."""
    run = run_folder(job)
    for name in ("", *folders):
        (run / name).mkdir(parents=True)
    (run / "job.toml").write_text(dump_job(job))
    return run


def problem(call: object, *arguments: object) -> str:
    assert callable(call)
    with pytest.raises(InputError) as caught:
        call(*arguments)
    return str(caught.value)


def test_globs_come_in_natural_order_and_patterns_in_the_order_given(folder: Path) -> None:
    for patterns, numbers in ((["*"], (1, 2, 10)), (["s-10", "s-{2..1}"], (10, 2, 1))):
        names = expand_shards([f"{folder}/{pattern}.tar" for pattern in patterns])
        assert names == [f"{folder}/s-{number}.tar" for number in numbers]


def test_names_that_are_no_paths_are_expanded_and_not_looked_for() -> None:
    names = ["pipe:cat *.tar", "pipe:aws s3 cp s3://b/*.tar -", "https://b/0.tar?sign=*", "-"]
    assert expand_shards(["s3://b/{00..01}.tar", *names]) == ["s3://b/00.tar", "s3://b/01.tar", *names]


def test_globs_in_addresses_are_asked_of_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    for number in (10, 9, 1):
        files.pipe(f"/globs/s-{number}.tar", b"x")
    shards = [f"memory:///globs/s-{number}.tar" for number in (1, 9, 10)]
    assert expand_shards(["memory://globs/s-*.tar"]) == shards
    files.pipe("/globs/s-2.tar", b"x")
    assert expand_shards(["memory://globs/s-*.tar"]) == shards, "a process lists once"
    assert problem(expand_shards, ["memory://globs/t-*.tar"]) == "memory://globs/t-*.tar: no file matches"
    text = problem(expand_shards, ["http://b/{a,b}/*.tar"])
    assert (
        text == "http://b/a/*.tar: a web server does not list its files: name them with braces ({0000..0099})"
    )
    monkeypatch.setattr("trainer.data.files.STORE_WAITS_S", ())
    monkeypatch.setattr("trainer.data.shard_names.file_system", lambda pattern: 1 / 0)
    with pytest.raises(StorageError, match=r"data.train: memory://globs/\?.tar: cannot be read"):
        check_data(Data(train=("memory://globs/?.tar",)))


def test_keys_that_may_only_list_a_folder_are_enough_for_a_glob(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/listed/s-1.tar", b"x")
    info = files.info

    def denied(path: str, **options: object) -> object:
        if "*" in path:
            raise PermissionError("Forbidden")
        return info(path, **options)

    monkeypatch.setattr(files, "info", denied)
    assert expand_shards(["memory://listed/s-*.tar"]) == ["memory:///listed/s-1.tar"]


@pytest.mark.parametrize("name", ["a[1]", "b{2}", "c*", "d,e", "f\\g", "h i"])
def test_a_job_in_a_folder_with_special_characters_finds_its_shards(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "x.tar").touch()
    (folder / "job.toml").write_text(JOB)
    for pattern in ("x.tar", "*.tar", "{x..x}.tar"):
        assert expand_shards(job_in(folder, f"data.train='{pattern}'").data.train) == [f"{folder}/x.tar"]


def test_a_name_that_looks_like_a_pattern_is_the_file_if_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "a[1].tar").touch()
    assert expand_shards([f"{tmp_path}/a[1].tar"]) == [f"{tmp_path}/a[1].tar"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (
            "{folder}/*.csv",
            (
                "{folder}/*.csv: no file matches; the folder {folder} holds job.toml, s-1.tar, "
                "s-2.tar and 1 more"
            ),
        ),
        ("{folder}/no/*.tar", "{folder}/no/*.tar: no file matches; there is no folder {folder}/no"),
        ("{folder}/a.tar", "{folder}/a.tar: no such file; the folder {folder} holds"),
        (
            "{folder}/s-{{0..9}}.tar",
            "8 of 10 files are missing: s-0.tar, s-3.tar, s-4.tar and 5 more; the folder {folder} holds",
        ),
        ("{folder}", "{folder} is a folder: name the files, for example {folder}/*.tar"),
        ("{folder}/s-{{1", "cannot expand its braces"),
        (
            "{folder}/{{0..99999999999}}",
            "its braces stand for 100,000,000,000 names; at most 1,000,000 are allowed",
        ),
        (" ", "an empty pattern names no file"),
    ],
)
def test_a_pattern_that_finds_nothing_says_where_it_looked_and_what_is_there(
    folder: Path, pattern: str, expected: str
) -> None:
    assert expected.format(folder=folder) in problem(expand_shards, [pattern.format(folder=folder)])


def test_an_empty_folder_is_called_empty(tmp_path: Path) -> None:
    assert f"the folder {tmp_path} is empty" in problem(expand_shards, [f"{tmp_path}/*.tar"])


def test_every_bad_pattern_is_reported(folder: Path) -> None:
    assert len(problem(expand_shards, ["", f"{folder}/x.tar", f"{folder}/y.tar"]).splitlines()) == 3


def test_a_command_of_a_stream_runs_as_it_is_written() -> None:
    for command in (r"sed 's/\.tar$/\n/'", r"grep '\{2,3\}'", r"printf 'a\\b'", "cat a \\\n b", "a\\"):
        assert expand_shards([f"pipe:{command}"]) == [f"pipe:{command}"]
    for command in (r'awk "{print \$1}" x', r'f() { echo "\$1"; }; f x.tar', r'python -c "d={\"a\":1}"'):
        assert expand_shards([f"pipe:{command}"]) == [f"pipe:{command}"]
    assert expand_shards([r"pipe:x a{b\,c,d}"]) == [r"pipe:x ab\,c", "pipe:x ad"]
    assert expand_shards([r"pipe:cat {a,b}\ c.tar"]) == [r"pipe:cat a\ c.tar", r"pipe:cat b\ c.tar"]


def test_a_shard_by_two_names_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "s-2.tar: named more than once" in problem(expand_shards, [f"{folder}/*.tar", f"{folder}/s-2.tar"])
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
        assert f"{name} = {other}: named more than once" in problem(expand_shards, [name, other])
        assert expand_shards([other]) == [other]


def table(folder: Path, content: str, *, images: int = 3) -> Data:
    (folder / "data.csv").write_text(content)
    for number in range(images):
        (folder / f"{number}.png").touch()
    return Data(train=(f"{folder}/data.csv",))


def test_a_good_table_is_counted(tmp_path: Path) -> None:
    assert check_data(table(tmp_path, "image,caption\n0.png,a\n1.png,b\n2.png,c\n")) == 3


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("file,text\n0.png,a\n", ["column 'image'", "'file', 'text'"]),
        ("image,caption\n0.png,\n2.png,\n", ["column 'caption' is empty in every row"]),
        ("image,caption\n0.png,a\n7.png,b\n8.png,c\n", ["2 of 3 image files", "rows 3, 4", "7.png"]),
        ("image,caption\n", ["no rows"]),
        ("", ["empty"]),
    ],
)
def test_problems_of_a_table_name_column_and_row(tmp_path: Path, content: str, expected: list[str]) -> None:
    found = problem(check_data, table(tmp_path, content))
    assert [part for part in expected if part not in found] == []


def test_every_bad_table_is_reported(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("x,y\n1,2\n")
    found = problem(check_data, Data(train=(f"{tmp_path}/*.csv",), format="table"))
    assert [line.split(":")[0] for line in found.splitlines()] == [f"{tmp_path}/a.csv", f"{tmp_path}/b.csv"]


def test_tables_among_shards_are_refused(folder: Path) -> None:
    table(folder, "image,caption\n0.png,a\n")
    assert "data.csv is a table among shards" in problem(
        check_data, Data(train=(f"{folder}/*.tar", f"{folder}/data.csv"))
    )


def test_shards_are_counted_where_every_one_is_recorded(folder: Path) -> None:
    shards = expand_shards([f"{folder}/*.tar"])
    assert recorded_sizes(shards) is None
    (folder / "sizes.json").write_text(json.dumps({"s-1.tar": 3, "s-2.tar": 4}))
    assert recorded_sizes(shards) is None
    (folder / "s-10_stats.json").write_text(json.dumps({"successes": 5}))
    assert sum(recorded_sizes(shards) or ()) == 12


def test_fewer_samples_than_a_global_batch_are_refused(folder: Path) -> None:
    (folder / "sizes.json").write_text(json.dumps({"s-1.tar": 1, "s-2.tar": 1, "s-10.tar": 1}))
    assert "3 samples, fewer than optim.global_batch_size = 4" in problem(check_job, job_in(folder), 1)


def test_known_models_are_those_of_open_clip() -> None:
    import open_clip

    of_tests = "tiny-"  # those that other tests add
    packaged = [name for name in open_clip.list_models() if not name.startswith(of_tests)]
    assert known_models() == sorted(packaged)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("ViT-B32", "ViT-B-32"),
        ("vit-b-16-siglip", "ViT-B-16-SigLIP"),
        ("resnet50", "RN50"),
        ("0", "for example"),
    ],
)
def test_an_unknown_model_is_refused_with_the_nearest_names(name: str, near: str) -> None:
    assert near in problem(check_model, name)


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B/32", "hf-hub:org/model"])
def test_models_that_open_clip_accepts_are_accepted(name: str) -> None:
    assert refusal(check_model, name) == ""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such config file"),
        ("{", "is not JSON"),
        ('{"embed_dim": 1}', "lacks vision_cfg, text_cfg"),
        ("[]", "lacks embed_dim, vision_cfg"),
    ],
)
def test_a_model_config_that_cannot_be_one_is_refused(
    tmp_path: Path, content: str | None, expected: str
) -> None:
    path = tmp_path / "model.json"
    if content is not None:
        path.write_text(content)
    assert expected in problem(check_model, str(path))


def test_a_folder_without_a_model_config_is_refused(tmp_path: Path) -> None:
    assert "contains no open_clip_config.json" in problem(check_model, f"local-dir:{tmp_path}")


def test_weights_that_are_not_there_are_refused(tmp_path: Path) -> None:
    assert "no weights file" in problem(check_pretrained, f"{tmp_path}/w.pt")
    check_pretrained("laion2b_s34b_b79k")


def test_the_tags_of_a_model_are_those_of_open_clip() -> None:
    from open_clip.pretrained import _PRETRAINED

    for model, tags in _PRETRAINED.items():
        assert {clean_tag(tag) for tag in tags} <= set(known_tags(model)), model
        assert model.endswith("-quickgelu") or len(tags) == len(known_tags(model))


@pytest.mark.parametrize(
    ("name", "tag", "near"),
    [
        ("ViT-B-32", "laion2b_s34b_b79", "laion2b_s34b_b79k"),
        ("ViT-B/32", "Openia", "openai"),
        ("RN50", "0", "it has cc12m, openai"),
    ],
)
def test_an_unknown_tag_is_refused_with_the_nearest(folder: Path, name: str, tag: str, near: str) -> None:
    job = job_in(folder, f"model.name={name}", f"model.pretrained={tag}")
    assert near in problem(check_tag, name, tag)
    assert near in problem(check_job, job, 1)
    assert near in problem(check_without_files, job, 1)


def test_a_tag_of_a_model_without_weights_is_refused() -> None:
    assert "open_clip has no weights for ViT-S-32-alt" in problem(check_tag, "ViT-S-32-alt", "nonsense")


@pytest.mark.parametrize("name", ["hf-hub:org/model", "local-dir:/models/own"])
def test_a_tag_beside_a_name_that_has_weights_is_refused(name: str) -> None:
    """open_clip would take the model's own weights without an error."""
    assert f"{name} has its own weights and none called 'openai'" in problem(check_tag, name, "openai")
    check_tag(name, "./weights.pt")


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B/32", "ViT-B-32-quickgelu", "my-own.json"])
def test_tags_that_open_clip_accepts_are_accepted(name: str) -> None:
    assert [refusal(check_tag, name, tag) for tag in ("openai", "OpenAI")] == ["", ""]


def test_the_loss_of_captions_is_for_models_that_write_them_alone(folder: Path) -> None:
    coca = "model.name=coca_ViT-B-32"
    assert "coca_ViT-B-32 also writes captions (CoCa)" in problem(check_job, job_in(folder, coca), 1)
    assert "ViT-B-32 writes no captions" in problem(check_job, job_in(folder, "optim.loss=coca"), 1)
    check_job(job_in(folder, coca, "optim.loss=coca"), 1)
    locked = job_in(folder, coca, "optim.loss=coca", "model.lock_text=true")
    assert "model.lock_text: coca_ViT-B-32 writes captions" in problem(check_job, locked, 1)
    captured = job_in(folder, coca, "optim.loss=coca", "model.cuda_graphs=true")
    assert "cannot be captured one by one" in problem(check_job, captured, 1)
    config = {"embed_dim": 1, "vision_cfg": {}, "text_cfg": {}, "multimodal_cfg": {}}
    (folder / "mine.json").write_text(json.dumps(config))
    assert "mine.json also writes captions" in problem(
        check_loss, job_in(folder, f"model.name={folder}/mine.json")
    )
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    assert "also writes captions" in problem(check_loss, job_in(folder, f"model.name=local-dir:{folder}"))
    for name in ("ViT-B-32", "hf-hub:org/model", "no-such-model", f"{folder}/none.json"):
        check_loss(job_in(folder, f"model.name={name}"))


def evaluation(folder: Path, **values: object) -> Eval:
    return Eval.model_validate({"zero_shot": (f"{folder}/*.tar",), "class_names": ("cat", "dog"), **values})


def test_class_names_and_templates_come_from_files_or_the_job(folder: Path) -> None:
    (folder / "names.txt").write_text("cat\ndog \n\n")
    assert class_names(evaluation(folder, class_names=f"{folder}/names.txt")) == ("cat", "dog")
    assert templates(evaluation(folder)) == ("a photo of a {}.",)


@pytest.mark.parametrize(
    ("key", "content", "expected"),
    [
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
    path = folder / "names.txt"
    if content is not None:
        path.write_text(content)
    found = problem(check_evaluation, evaluation(folder, **{key: str(path)}))
    assert expected in found
    assert found.startswith(f"eval.{key}: ")


def test_words_of_a_set_are_known_by_name_and_left_to_the_ranks_without_open_clip(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = evaluation(folder, class_names="set:imagenet", templates="set:imagenet")
    assert (len(class_names(named)), len(templates(named))) == (1000, 80)
    found = problem(check_evaluation, evaluation(folder, class_names="set:imagnet"))
    assert found == 'eval.class_names: there is no set called "imagnet"; there are imagenet'
    imagenet_words.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    try:
        check_evaluation(named)
        with pytest.raises(InputError, match="open_clip_torch"):
            class_names(named)
    finally:
        imagenet_words.cache_clear()


@pytest.mark.parametrize("template", ["a {style} photo of a {}", "{} and {}", "a } of a {}", "a {} {0}"])
def test_a_template_that_no_class_name_fits_is_refused(folder: Path, template: str) -> None:
    found = problem(check_evaluation, evaluation(folder, templates=("a {}", template)))
    assert f"eval.templates: {template!r}: a template has the class name once" in found
    check_evaluation(evaluation(folder, templates=("a {} in {{braces}}",)))


def test_the_evaluations_shards_are_looked_for(folder: Path) -> None:
    found = problem(check_evaluation, evaluation(folder, zero_shot=(f"{folder}/x.tar",)))
    assert found.startswith("eval.zero_shot: ")
    check_evaluation(evaluation(folder))


def test_a_run_folder_with_the_same_job_is_taken_wherever_it_runs(folder: Path) -> None:
    job = job_in(folder)
    assert refusal(check_run_folder, job) == ""
    run_folder(job).mkdir(parents=True)
    assert refusal(check_run_folder, job) == ""
    (run_folder(job) / "job.toml").write_text(dump_job(job))
    assert refusal(check_run_folder, job) == ""
    assert refusal(check_run_folder, job_in(folder, "resources.nodes=2", "logging.every_steps=1")) == ""


def test_a_run_that_went_back_and_saved_again_no_longer_needs_that_checkpoint(folder: Path) -> None:
    gone = f"{folder}/step-00000012"
    job = job_in(folder, f"checkpoint.resume={gone}")
    assert "there is no checkpoint at" in problem(check_job, job, 1)
    for step, resume in ((12, "auto"), (14, gone)):
        saved = run_folder(job) / f"checkpoints/step-{step:08d}"
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text(json.dumps({"job": {"checkpoint": {"resume": resume}}}))
    (run_folder(job) / "job.toml").write_text(dump_job(job))
    check_job(job, 1)
    assert "there is no checkpoint at" in problem(check_job, job_in(folder, f"checkpoint.resume={gone}3"), 1)
    fresh = refusal(check_job, job, 1, fresh=True)
    assert "there is no checkpoint at" in fresh, "what the run went on to will be set aside"
    broken = run_folder(job) / "checkpoints/step-00000016"
    broken.mkdir()
    (broken / "manifest.json").write_text('{"job": {"checkp')
    check_job(job, 1)


def test_keys_that_change_no_sample_may_change_on_resume(folder: Path) -> None:
    made_run(job_in(folder))
    changed = job_in(
        folder, "data.max_bad_share=0.5", "data.on_bad_sample=fail", "data.index=elsewhere", "data.workers=7"
    )
    assert refusal(check_run_folder, changed) == ""


def test_a_run_folder_without_a_job_file_is_accepted(folder: Path) -> None:
    job = job_in(folder)
    for name in ("flight-records", "logs", ".exit.json.of-3"):
        (run_folder(job) / name).mkdir(parents=True)
    assert refusal(check_run_folder, job) == ""


def test_a_retrieval_set_has_no_weights_of_the_training_data(folder: Path) -> None:
    sources = [f"{folder}/s-1.tar", f"{folder}/s-1.tar"]
    job = job_in(
        folder, f"data.train={sources}", "data.weights=[1.0, 0.5]", f"eval.retrieval=['{folder}/s-1.tar']"
    )
    assert job.retrieval_data.weights is None


def test_a_run_folder_with_another_job_names_the_keys_that_differ(folder: Path) -> None:
    (made_run(job_in(folder)) / "metrics.jsonl").write_text("{}")
    found = problem(check_run_folder, job_in(folder, "optim.lr=0.25", "optim.grad_clip_norm=1.0"))
    assert (
        "optim.lr is 0.0005 there and 0.25 here; optim.grad_clip_norm is not set there and 1.0 here;" in found
    )
    assert "--set name=" in found


def test_another_length_is_refused_with_the_option_that_goes_on(folder: Path) -> None:
    made_run(job_in(folder))
    assert "give --longer steps=9; or choose" in problem(check_run_folder, job_in(folder, "optim.steps=9"))
    assert "give --shorter steps=1; or choose" in problem(check_run_folder, job_in(folder, "optim.steps=1"))
    assert "--longer" not in problem(check_run_folder, job_in(folder, "optim.steps=9", "optim.lr=0.25"))


def test_a_run_folder_without_a_step_may_be_used_by_another_job(folder: Path) -> None:
    job, other = job_in(folder), job_in(folder, "optim.lr=0.25")
    (made_run(job, "logs") / "metrics.jsonl").touch()
    check_run_folder(other)
    assert "did no step: this one takes its place" in used_again(other)
    assert used_again(job) == ""
    (run_folder(job) / "checkpoints/step-00000001").mkdir(parents=True)
    assert "optim.lr is 0.0005 there" in problem(check_run_folder, other)
    assert used_again(other) == ""


@pytest.mark.parametrize(
    ("name", "expected"), [("notes.txt", "so it is not a run"), ("job.toml", "cannot be read")]
)
def test_a_run_folder_that_holds_something_else_is_left_alone(folder: Path, name: str, expected: str) -> None:
    job = job_in(folder)
    run_folder(job).mkdir(parents=True)
    (run_folder(job) / name).write_text("x")
    assert expected in problem(check_run_folder, job)


def test_a_run_folder_below_a_file_is_refused(folder: Path) -> None:
    assert "is a file" in problem(check_run_folder, job_in(folder, "logging.runs=s-1.tar"))
    assert "is a file" in problem(check_run_folder, job_in(folder, "logging.runs=.", "name=s-1.tar"))


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
    job = job_in(folder)
    (folder / "runs").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    request.getfixturevalue("_without_roots_rights")
    assert "no permission to write" in problem(check_run_folder, job)


def test_all_problems_of_a_job_are_reported_together(folder: Path) -> None:
    job = job_in(
        folder,
        "data.train=no.tar",
        "model.name=ViT-B-3",
        "model.pretrained=no.pt",
        "logging.runs=s-1.tar",
        "optim.global_batch_size=5",
    )
    found = problem(check_job, job, 2).splitlines()
    assert [line.split(" ")[0] for line in found] == [
        "data.train:",
        "optim.global_batch_size",
        "model.name:",
        "model.pretrained:",
        "run",
    ]
