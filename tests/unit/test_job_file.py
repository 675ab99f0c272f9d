"""The job file: what is read, what is refused and how, what is written, and its JSON Schema."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from tools.reference import job_schema
from trainer.config import Job
from trainer.config.loader import dump_job, from_here, load_job, resolve_paths
from trainer.errors import InputError
from trainer.plan.trained import evaluation_job

SMALLEST = 'name = "x"\n[data]\ntrain = "a.tar"\n[optim]\nglobal_batch_size = 8\nsteps = 2\n'

OF_A_SHELL = re.compile(r"\$\{|\$[A-Za-z_]|~[^/]|~\Z")
"""Beginning of a path that is refused."""
text = st.text(min_size=1, max_size=30).filter(
    lambda value: "\x00" not in value and "://" not in value and not OF_A_SHELL.match(value)
)
texts = st.lists(text, min_size=1, max_size=3).map(tuple)
positive = st.integers(min_value=1, max_value=10**12)


@pytest.fixture
def job_path(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(SMALLEST)
    return path


def problems(path: Path, content: str, *overrides: str) -> list[str]:
    """Returns the problems that `clipship check` finds in the content, with the folder's name cut off."""
    path.write_text(content)
    words = [word for override in overrides for word in ("--set", override)]
    code, out, err = clipship("check", path, "--no-data", "--json", *words)
    assert code == 2
    found: list[str] = json.loads(out)["problems"] if out else [err.removeprefix("clipship: ").rstrip("\n")]
    return [line.replace(f"{path.parent}/", "") for line in found]


def test_every_problem_is_told_at_once_with_line_and_key(job_path: Path) -> None:
    content = (
        'name = "x"\nseed = "1"\n\n[data]\ntrain = "a.tar"\nworkers = 300\n[optim]\nglobal_batch_size = 0\n'
        "lr = -0.1\nsteps = 1\n"
    )
    assert problems(job_path, content) == [
        'job.toml:2: seed: expected a whole number (given "1")',
        "job.toml:6: data.workers: must be at most 256 (given 300)",
        "job.toml:8: optim.global_batch_size: must be at least 1 (given 0)",
        "job.toml:9: optim.lr: must be greater than 0 (given -0.1)",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nmae = 1", "nmae: unknown key; did you mean name?"),
        ("learning_rate = 1", "learning_rate: unknown key; here it is optim.lr"),
        ("optim.lrate = 1", "optim.lrate: unknown key; the nearest are optim.lr, "),
        ("warmup_steps = 1", "warmup_steps: unknown key; did you mean optim.warmup_steps?"),
        ("model.precision = 'fp61'", '"bf16", "fp16", "fp64" (given "fp61"); did you mean "fp64"?'),
        ("model.lock_image = 1", "model.lock_image: expected true or false (given 1)"),
        ("model.name = ''", 'model.name: must not be empty (given "")'),
        ('model.name = "a\\u0000"', "model.name: must not contain a NUL character"),
        ("slurm.time = 12:30:00", 'the bare date or time 12:30:00: write it in quotes, "12:30:00"'),
        ("eval.zero_shot = 'a.tar'", "eval: zero_shot needs class_names"),
        ("data.crop_scale = [0.5, 2.0]", "data.crop_scale: must be two numbers"),
        ("timeouts.init_s = inf", "timeouts.init_s: must be at most 604,800 (given inf)"),
        ("resources.nodes = 1.0", "resources.nodes: expected a whole number (given 1.0)"),
        ("timeouts.nccl_timeout = 1", "unknown key; here it is [timeouts]"),
        ("data.val_data = 1", "unknown key; here it is eval.retrieval"),
        ("optim = { global_batch_size = 8, steps = 9, cooldown_share = 0.2 }", "cooldown_share belongs to"),
        ("optim = { global_batch_size = 8, steps = 9, optimizer = 'sgd', beta1 = 0.0 }", "beta1 = 0 leaves"),
        ("model.lock_image_unlocked_groups = 1", "set lock_image = true, too"),
        ("model.unlock_after_step = 2", "unlock_after_step unlocks nothing"),
        ("timeouts.data_s = 300.0", "data_s = 300 must be less than step_s = 300: while one rank waits"),
        ("timeouts.silence_s = 1.9", "timeouts.silence_s: must be at least 2 (given 1.9)"),
        ("timeouts.collective_s = 600.0", "collective_s = 600 must be at least 1830 (eval_s and 30 s more)"),
        ("env.RANK = '1'", "RANK: cannot be set"),
        ("env.'A B' = ''", "expected the name of a variable"),
        ("comm.timeline = [9, 3]", "the first step, 9, must not be after the last one, 3"),
        ("data = { train = 'a.tar', filters = ['a[*]>1'] }", "a[*] names no single field of a JSON member"),
    ],
)
def test_a_wrong_line_is_explained_in_the_users_words(job_path: Path, line: str, expected: str) -> None:
    found = [
        problem for problem in problems(job_path, f"{line}\nx = 1") if problem.startswith("job.toml:1: ")
    ]
    assert expected in found[0]


@pytest.mark.parametrize(
    ("key", "hatch"),
    [
        (
            "slurm.exclusive",
            "did you mean slurm.exclude? If it is an option of sbatch, give it as slurm.extra",
        ),
        ("kubernetes.seccomp", "that runs the pods, set it in kubernetes.patch"),
        ("comm.nccl.debug", "ib_hca. If it is a variable of NCCL, set it in [env]: NCCL_DEBUG"),
    ],
)
def test_an_unknown_key_of_a_section_with_a_hatch_is_sent_there(job_path: Path, key: str, hatch: str) -> None:
    [problem] = problems(job_path, f"{key} = 1\n{SMALLEST}")
    assert problem.startswith(f"job.toml:1: {key}: unknown key; ")
    assert hatch in problem


def test_missing_keys_and_sections_are_named(job_path: Path) -> None:
    assert problems(job_path, "[data]\ntrain = 'a.tar'\n[optim]\nsteps = 1\n") == [
        "job.toml: name: missing; it must be given at the top of the file",
        "job.toml:3: optim.global_batch_size: missing; it must be given in section [optim]",
    ]
    section = "job.toml: optim: missing; a job needs the section [optim] with global_batch_size"
    assert section in problems(job_path, "name = 'x'")


def of_data(job_path: Path, line: str) -> list[str]:
    """Returns the problems of a job with one more line in [data]."""
    return problems(job_path, SMALLEST.replace('train = "a.tar"', f'train = "a.tar"\n{line}'))


def test_made_up_pictures_beside_data_are_refused(job_path: Path) -> None:
    found = of_data(job_path, 'format = "synthetic"')
    assert 'train names data (a.tar), but format = "synthetic" trains on made-up pictures' in found[0]


@pytest.mark.parametrize("ending", ["json", "JSON", "meta.json"])
def test_captions_are_not_taken_from_json_without_a_field(job_path: Path, ending: str) -> None:
    found = of_data(job_path, f'caption_key = "{ending}"')
    assert f"data.caption_key: {ending} is JSON, and each line of its text would become a caption" in found[0]
    for command in (["index"], ["data", "stats"], ["data", "show"]):
        said = clipship(*command, "a.tar", "--caption-key", ending)
        assert (said.code, f"--caption-key: {ending} is JSON" in said.err) == (2, True)


@pytest.mark.parametrize(
    "key",
    ["json:", "json:.a", "json:a.", "json:a[", "json:a[x]", "json:a[-1]", "json:a[*]b", "json:a..b",
     "jsonl:a", "json:" + "[0]" * 33],
)  # fmt: skip
def test_a_path_that_cannot_be_read_is_refused_with_examples(job_path: Path, key: str) -> None:
    found = of_data(job_path, f'caption_key = "{key}"')
    assert len(found) == 1
    assert found[0].startswith(f"job.toml:4: data.caption_key: {key}")
    assert "json:caption" in found[0]


def test_an_unknown_encoding_is_refused_with_those_allowed(job_path: Path) -> None:
    found = of_data(job_path, 'encoding = "utf-7"')
    assert "data.encoding" in found[0]
    assert "gb18030" in found[0]
    said = clipship("data", "stats", "a.tar", "--encoding", "utf-7")
    assert '--encoding: must be one of "utf-8", "gb18030", "big5"' in said.err


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('name = "x"\nseed = \n', "job.toml:2: not valid TOML, column 8: Invalid value"),
        ('name = "x"\n[data\n', "job.toml:2: not valid TOML"),
        ('name = "x"\nname = "y"\n', "job.toml:2: this key stands in its section already"),
        (
            "[a]\n[data.augment]\nx = 1\n[data.augment]\n",
            "job.toml:4: section [data.augment] stands here again",
        ),
        ('name = """x\n\n', "job.toml:3: not valid TOML: Unterminated string"),
        (f"seed = {'9' * 5000}", "job.toml:1: not valid TOML"),
        (f"seed = {'[' * 5000}", "nested too deeply"),
    ],
)
def test_a_syntax_error_names_its_line(job_path: Path, content: str, expected: str) -> None:
    assert expected in problems(job_path, content)[0]


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"name = '\xff'")
    for path, expected in (
        (tmp_path / "no.toml", "clipship init"),
        (tmp_path, "is a folder"),
        (tmp_path / "binary.toml", "not UTF-8"),
    ):
        assert expected in clipship("check", path).err


def test_overrides_are_read_as_toml_else_as_text_and_the_last_one_wins(job_path: Path) -> None:
    words = ["optim.lr=1e-3", "name=it is = mine", "data.train=['a','b']", "slurm.time=12:30:00"]
    job = load_job(job_path, words)
    assert (job.optim.lr, job.name, job.slurm.time) == (1e-3, "it is = mine", "12:30:00")
    assert [Path(name).name for name in job.data.train] == ["a", "b"]
    job = load_job(job_path, ["optim.lr=1.0", "optim.lr=2.0", "optim.steps=", "optim.epochs=3"])
    assert (job.optim.lr, job.optim.steps, job.optim.epochs) == (2.0, None, 3)
    assert load_job(job_path, ["logging.runs='a'\nseed = 7"]).seed == 0, "it brings no lines of its own"


FORM = (
    "expected key=value, for example optim.lr=1e-3, data.train=shards/*.tar "
    """or 'kubernetes.mounts."/data"=pvc:data'"""
)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lr=-1", "--set optim.lr: must be greater than 0 (given -1)"),
        ("optim.epochs=1", "--set optim.epochs: optim: give either epochs or steps"),
        ("data.train.x=1", "--set data.train.x: data.train is a value and has no keys"),
        ("optim.lr", f"--set 'optim.lr': {FORM}"),
        ("kubernetes.mounts./data=pvc:a", f"--set 'kubernetes.mounts./data=pvc:a': {FORM}"),
        ("name=[1]", "--set name: expected text in quotes (given [1])"),
        (
            "stack.torch=latest",
            (
                '--set stack.torch: "latest" is not a release of torch; '
                'expected one of `clipship stacks`, such as "2.14.1", or "base"'
            ),
        ),
    ],
)
def test_a_wrong_override_is_placed_on_the_command_line(job_path: Path, override: str, expected: str) -> None:
    assert problems(job_path, SMALLEST, override) == [expected]


def test_what_is_typed_without_quotes_is_text_where_text_is_wanted(job_path: Path) -> None:
    words = ["name=2024", "slurm.account=0.10", "env.OMP_NUM_THREADS=4", "stack.cuda=13.0"]
    job = load_job(job_path, [*words, 'kubernetes.mounts."/data"=pvc:a'])
    assert (job.name, job.slurm.account, job.stack.cuda) == ("2024", "0.10", "13.0")
    assert job.env == {"OMP_NUM_THREADS": "4"}
    assert job.kubernetes.mounts == {"/data": "pvc:a"}


def test_times_of_slurm_are_taken_and_others_refused_with_the_forms(job_path: Path) -> None:
    for length in ("90", "30:00", "12:30:00", "2-12", "2-12:30:00"):
        assert load_job(job_path, [f'slurm.time="{length}"']).slurm.time == length
    for length in ("12h", "1:60", "2-24", "2-", "-1", "1:00:00:00", "90\n", "٣"):
        assert "HH:MM:SS" in problems(job_path, SMALLEST + f"[slurm]\ntime = {length!r}")[0]


def test_relative_paths_start_at_the_job_files_folder(
    job_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.setenv("HOME", "/home/me[1]")
    shards = '["s/{0..1}.tar", "/abs/*.tar", "~/a.tar", "s3://bucket/x.tar"]'
    words = ["model.name=tiny.json", "model.pretrained=~/w.pt", "eval.class_names=names.txt"]
    job = load_job(job_path, [f"data.train={shards}", *words])
    here = str(job_path.parent)
    own, *others = job.data.train
    assert own == f"{here}/s/{{0..1}}.tar"
    assert others == ["/abs/*.tar", "/home/me[[]1]/a.tar", "s3://bucket/x.tar"]
    assert (job.model.name, job.model.pretrained) == (f"{here}/tiny.json", "/home/me[1]/w.pt")
    assert job.logging.runs == f"{here}/runs"
    assert job.eval.class_names == f"{here}/names.txt"
    assert job.eval.templates == ("a photo of a {}.",)


@pytest.mark.parametrize("path", ["$SCRATCH/runs", "${HOME}/runs", "~bob/runs", "~"])
def test_a_path_that_only_a_shell_would_replace_is_refused(job_path: Path, path: str) -> None:
    for key in ("logging.runs", "data.train"):
        with pytest.raises(InputError) as refused:
            load_job(job_path, [f"{key}={path}"])
        assert f"{key}: {path} is taken as it stands" in str(refused.value)
    for name in (f"./{path}", "a$b", "$1", "a/~b", "a~"):  # within a name they are characters of it
        runs = f"{job_path.parent}/{name.removeprefix('./')}"
        assert load_job(job_path, [f"logging.runs={name}"]).logging.runs == runs


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    finite = st.floats(min_value=1e-12, max_value=1e6)
    shards = texts.filter(lambda names: not any(":" in name or name == "-" for name in names))
    return Job.model_validate(
        {
            "name": draw(st.from_regex(r"[A-Za-z0-9 '\"\\$`#é-]{0,20}x", fullmatch=True).map(str.strip)),
            "data": {
                "train": draw(shards),
                "separator": draw(st.sampled_from([None, "\t", ";"])),
                "crop_scale": (draw(st.floats(0.01, 1)), 1.0),
            },
            "model": {"name": draw(text), "pretrained": draw(st.none() | text)},
            "optim": {"global_batch_size": draw(positive), "steps": draw(positive), "lr": draw(finite)},
            "comm": {"nccl": {"socket_ifname": draw(st.none() | text)}, "torch": {"bucket_mb": draw(finite)}},
            "eval": {"class_names": draw(text | texts)},
            "logging": {"runs": draw(text)},
            **draw(st.sampled_from([{}, {"slurm": {}}, {"slurm": {}, "kubernetes": {}}])),
        }
    )


@settings(deadline=None)
@given(job=jobs())
def test_what_is_dumped_loads_to_an_equal_job(tmp_path_factory: pytest.TempPathFactory, job: Job) -> None:
    path = tmp_path_factory.getbasetemp() / "dumped.toml"
    resolved = resolve_paths(job, Path("/base [1]/{2}"))
    path.write_bytes(dump_job(resolved).encode())
    assert load_job(path) == resolved
    assert load_job(path).schedulers.keys() == resolved.schedulers.keys()


def test_presets_are_valid_explain_themselves_and_set_no_key_without_effect(tmp_path: Path) -> None:
    presets = [line.split()[0] for line in clipship("init", "--list").out.splitlines() if line.strip()]
    assert len(presets) >= 4
    for name in presets:
        path = tmp_path / f"{name}.toml"
        assert clipship("init", "--preset", name, path).code == 0
        assert path.read_text().count("#") >= 20
        found = json.loads(clipship("check", path, "--no-data", "--json").out)
        assert (found["ok"], found["no_effect"]) == (True, {})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "kubernetes.patch.worker." + "a." * 900 + "a = 1",
            "a key with more than 64 parts|nested more than 64",
        ),
        ('"x" = {' + '"a".' * 900 + "a = 1}", "a key with more than 64 parts|nested more than 64 levels"),
        ("x = " + "{a=" * 90 + "1" + "}" * 90, "nested more than 64 levels"),
        ("a." * 200_000 + "a = 1", "a key with more than 64 parts|nested more than 64 levels"),
        (f"env.X = 0x{'f' * 9000}", "a number of more than 64 bits; TOML has whole numbers from -2"),
        (f'seed = "https://user:s3cr3t{"x" * 100}@host/"', r"\(given \"https://\*\*\*@host/\"\)$"),
    ],
)
def test_what_is_vast_is_refused_with_its_line_and_no_password(job_path: Path, line: str, why: str) -> None:
    told = [each for each in problems(job_path, f'name = "x"\n{line}\n') if each.startswith("job.toml:2: ")]
    assert len(told) == 1
    assert re.search(why, told[0])
    assert len(told[0]) < 300


def test_many_unknown_keys_are_counted(job_path: Path) -> None:
    told = problems(job_path, "".join(f"unknown_key_{n} = 1\n" for n in range(3000)) + SMALLEST)
    assert told[0].startswith("job.toml:1: unknown_key_0: unknown key; ")
    assert (len(told), told[-1]) == (101, "and 2,900 more problems")


def test_a_file_too_large_for_a_job_is_not_read(job_path: Path) -> None:
    (told,) = problems(job_path, "#" * 1_000_001)
    assert "1,000,001 bytes and is not a job file" in told


@pytest.mark.parametrize(
    "key", ["logging.runs", "image.site.pip_conf", "checkpoint.resume", "model.pretrained", "slurm.image"]
)
def test_a_path_that_no_file_system_has_is_refused(job_path: Path, key: str) -> None:
    for long in ("/" + "x" * 256, "/x" * 2500, "/x" * 600):
        (told,) = problems(job_path, f'{key} = "{long}.sif"\n{SMALLEST}')
        assert "too long for a path" in told
        assert len(told) < 250


@pytest.mark.parametrize(
    ("best", "needed"), [("zero_shot_top1", "eval.zero_shot"), ("retrieval_i2t_r1", "eval.retrieval")]
)
def test_the_best_checkpoint_is_one_that_is_measured(job_path: Path, best: str, needed: str) -> None:
    (told,) = problems(job_path, f'{SMALLEST}[checkpoint]\nbest = "{best}"\n')
    assert told.endswith(f"checkpoint.best = {best} needs {needed}")


def test_a_name_too_long_for_a_folder_is_refused(job_path: Path) -> None:
    (told,) = problems(job_path, SMALLEST.replace('"x"', f'"{"é" * 150}"'))
    assert told.endswith("at most 240 bytes, and it has 300")
    (told,) = problems(job_path, f'model.pretrained = "{"x" * 5000}"\n{SMALLEST}')
    assert "model.pretrained: ViT-B-32 has no weights called 'xxx" in told


# The JSON Schema: an editor with it takes and refuses what the loader does


VALID = {"name": "n", "data": {"format": "synthetic"}, "optim": {"global_batch_size": 8, "steps": 1}}


def underlined(job: dict[str, Any]) -> list[str]:
    """Returns the errors that an editor would underline."""
    job = json.loads(json.dumps(job))
    return [error.message for error in jsonschema.Draft7Validator(job_schema()).iter_errors(job)]


@pytest.mark.parametrize(
    "more",
    [
        {"data": {"train": "shards/{0..9}.tar"}},
        {"data": {"train": ["a.tar", "b.tar"], "crop_scale": [0.5, 1.0]}},
        {"eval": {"zero_shot": "a.tar", "class_names": ["cat"]}},
        {"slurm": {"time": 90, "extra": {"licenses": "a:1", "overcommit": True}}},
        {"env": {"A_1": "x"}, "kubernetes": {"env": {"K": "secret:a:b"}, "patch": {"worker": {"spec": {}}}}},
    ],
    ids=str,
)
def test_the_schema_takes_shorthands_that_the_loader_takes(more: dict[str, Any]) -> None:
    assert not underlined(VALID | more)


@pytest.mark.parametrize(
    "more",
    [
        {"sed": 1},
        {"seed": "1"},
        {"seed": -1},
        {"optim": {"steps": 1}},
        {"comm": {"backend": "mpi"}},
        {"env": {"1": "x"}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_loader_refuses(more: dict[str, Any]) -> None:
    assert underlined(VALID | more)


# Paths that are typed with --set start at the current folder, in each command and for the ranks.

JOB = """
name = "one"
[data]
train = "own.csv"
[model]
name = "ViT-B-32"
[optim]
global_batch_size = 8
steps = 5
[checkpoint]
resume = "auto"
[eval]
class_names = "classes.txt"
[image.site]
certificates = ["ca.pem"]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; the job file is in another one."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.toml").write_text(JOB)
    current = tmp_path / "here [1]"
    current.mkdir()
    monkeypatch.chdir(current)
    return current


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("model.name=a.json", "{here}/a.json"),
        ("model.name=ViT-L-14", "ViT-L-14"),
        ("logging.runs=2024", "{here}/2024"),
        ("eval.class_names=x.txt", "{here}/x.txt"),
        ("data.train=s3://bucket/x.tar", ("s3://bucket/x.tar",)),
        ("data.train=t.csv", ("{escaped}/t.csv",)),
        ('data.train=["t.csv", "u.csv"]', ("{escaped}/t.csv", "{escaped}/u.csv")),
        ('image.site.certificates=["a\\u007f\\"b.pem"]', ('{here}/a\x7f"b.pem',)),
        ('checkpoint={resume="old", keep=2}', "{here}/old"),
        ("optim.lr=1e-4", 1e-4),
    ],
)
def test_what_is_typed_starts_at_the_current_folder(here: Path, typed: str, path: Any) -> None:
    key = typed.partition("=")[0] + (".resume" if typed.startswith("checkpoint") else "")
    (text,) = from_here([typed])
    assert from_here([text]) == (text,)
    job: Any = load_job(here.parent / "jobs" / "job.toml", [text])
    for name in key.split("."):
        job = getattr(job, name)
    escaped = str(here).replace("[", "[[]")

    def meant(value: Any) -> Any:
        return value.format(here=here, escaped=escaped) if isinstance(value, str) else value

    assert job == (tuple(map(meant, path)) if isinstance(path, tuple) else meant(path))


def test_other_commands_have_the_same_rule(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed, wanted = "model.pretrained=w/x.pt", str(here / "w" / "x.pt")
    (here / "job.toml").write_text(dump_job(tiny_job()))
    clipship("clone", here, "new.toml", "--set", typed, code=0)
    assert load_job(Path("new.toml")).model.pretrained == wanted
    monkeypatch.setattr("trainer.plan.trained.check_evaluated", lambda _job: None)
    evaluated = evaluation_job("ViT-B-32:openai", None, {"retrieval": ("t.csv",)}, 1, [typed])
    assert evaluated.model.pretrained == wanted
