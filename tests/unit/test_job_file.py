"""The job file: what is read, what is refused and how, what is written."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.support.command_line import clipship
from trainer.config.loader import load_job
from trainer.errors import InputError

SMALLEST = 'name = "x"\n[data]\ntrain = "a.tar"\n[optim]\nglobal_batch_size = 8\nsteps = 2\n'

OF_A_SHELL = re.compile(r"\$\{|\$[A-Za-z_]|~[^/]|~\Z")
"""Beginning of a path that is refused."""
text = st.text(min_size=1, max_size=30).filter(
    lambda value: "\x00" not in value and not OF_A_SHELL.match(value)
)


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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nmae = 1", "nmae: unknown key; did you mean name?"),
        ("data.trian = 1", "data.trian: unknown key; did you mean data.train?"),
        ("learning_rate = 1", "learning_rate: unknown key; here it is optim.lr"),
        ("optim.lrate = 1", "optim.lrate: unknown key; the nearest are optim.lr, "),
        ("warmup_steps = 1", "warmup_steps: unknown key; did you mean optim.warmup_steps?"),
        ("comm.socket_ifname = 1", "comm.socket_ifname: unknown key; did you mean comm.nccl.socket_ifname?"),
        ("model.precision = 'fp61'", '"bf16", "fp16", "fp64" (given "fp61"); did you mean "fp64"?'),
        ("model.precision = 16", 'must be one of "fp32", "tf32", "bf16", "fp16", "fp64" (given 16)'),
        ("model.lock_image = 1", "model.lock_image: expected true or false (given 1)"),
        ("model = 1", "model: expected a section (given 1)"),
        ("model.name = ''", 'model.name: must not be empty (given "")'),
        ("model.name = 3", "model.name: expected text in quotes (given 3)"),
        ('model.name = "a\\u0000"', "model.name: must not contain a NUL character"),
        ("slurm.time = 12:30:00", 'the bare date or time 12:30:00: write it in quotes, "12:30:00"'),
        ("eval.class_names = 3", "eval.class_names: expected text in quotes or a list in brackets (given 3)"),
        ("eval.zero_shot = ['a.tar', 7]", "eval.zero_shot: expected text in quotes (given 7)"),
        ("eval.zero_shot = 'a.tar'", "eval: zero_shot needs class_names"),
        ("data.crop_scale = [0.5]", "data.crop_scale: expected more values (given [0.5])"),
        ("data.crop_scale = [0.5, 2.0]", "data.crop_scale: must be two numbers"),
        ("timeouts.init_s = inf", "timeouts.init_s: must be at most 604,800 (given inf)"),
        ("optim.eps = nan", "optim.eps: must be"),
        ("resources.nodes = 1.0", "resources.nodes: expected a whole number (given 1.0)"),
        ("resources.mem_gb_per_gpu = 1e308", "mem_gb_per_gpu: must be at most 1,000,000 (given 1e+308)"),
        ("resources.nodes = true", "resources.nodes: expected a whole number (given true)"),
        ("timeouts.nccl_timeout = 1", "unknown key; here it is [timeouts]"),
        ("optim.learning_rate = 1", "unknown key; here it is optim.lr"),
        ("optim.wd = 1", "unknown key; here it is optim.weight_decay"),
        ("optim.accum_freq = 1", "unknown key; here it is optim.max_batch_size_per_gpu"),
        ("data.val_data = 1", "unknown key; here it is eval.retrieval"),
        ("optim = { global_batch_size = 8, steps = 9, cooldown_share = 0.2 }", "cooldown_share belongs to"),
        (
            "optim = { global_batch_size = 8, steps = 9, optimizer = 'sgd', beta1 = 0.0 }",
            "beta1 = 0 leaves sgd no momentum",
        ),
        ("model.lock_image_unlocked_groups = 1", "set lock_image = true, too"),
        ("model.lock_text_unlocked_layers = 1", "set lock_text = true, too"),
        ("model.unlock_after_step = 2", "unlock_after_step unlocks nothing"),
        (
            "timeouts.data_s = 300.0",
            "data_s = 300 must be less than step_s = 300: while one rank waits for its",
        ),
        ("timeouts.step_s = 700.0", "first_step_s = 600 must be at least step_s = 700"),
        ("timeouts.silence_s = 1.9", "timeouts.silence_s: must be at least 2 (given 1.9)"),
        ("timeouts.collective_s = 600.0", "collective_s = 600 must be at least 1830 (eval_s and 30 s more)"),
        ("env.RANK = '1'", "RANK: cannot be set"),
        ("env.CLIPSHIP_X = ''", "CLIPSHIP_X"),
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
            "job.toml:4: section [data.augment] stands here again: move its keys into the first one, which",
        ),
        ('name = """x\n\n', "job.toml:3: not valid TOML: Unterminated string"),
        (f"seed = {'9' * 5000}", "job.toml:1: not valid TOML"),
        (f"seed = {'[' * 5000}", "nested too deeply"),
    ],
)
def test_a_syntax_error_names_its_line(job_path: Path, content: str, expected: str) -> None:
    assert expected in problems(job_path, content)[0]


FORM = (
    "expected key=value, for example optim.lr=1e-3, data.train=shards/*.tar "
    """or 'kubernetes.mounts."/data"=pvc:data'"""
)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lr=-1", "--set optim.lr: must be greater than 0 (given -1)"),
        ("optim.rl=1", "--set optim.rl: unknown key; did you mean optim.lr?"),
        ("optim.epochs=1", "--set optim.epochs: optim: give either epochs or steps"),
        ("data.train.x=1", "--set data.train.x: data.train is a value and has no keys"),
        ("optim.lr", f"--set 'optim.lr': {FORM}"),
        ("=1", f"--set '=1': {FORM}"),
        ("a..b=1", f"--set 'a..b=1': {FORM}"),
        ("kubernetes.mounts./data=pvc:a", f"--set 'kubernetes.mounts./data=pvc:a': {FORM}"),
        ("name=[1]", "--set name: expected text in quotes (given [1])"),
        (
            "stack.torch=latest",
            (
                '--set stack.torch: "latest" is not a release of torch; '
                'expected one of `clipship stacks`, such as "2.14.1", or "base"'
            ),
        ),
        ("stack.cuda=cu128", '--set stack.cuda: expected a version such as "2.14.1" (given "cu128")'),
        (
            'env."a b"=1',
            (
                "--set env.a b: env: expected the name of a variable: "
                'letters, digits and underscores, not beginning with a digit (given "a b")'
            ),
        ),
    ],
)
def test_a_wrong_override_is_placed_on_the_command_line(job_path: Path, override: str, expected: str) -> None:
    assert problems(job_path, SMALLEST, override) == [expected]


@pytest.mark.parametrize("path", ["$SCRATCH/runs", "${HOME}/runs", "~bob/runs", "~"])
def test_a_path_that_only_a_shell_would_replace_is_refused(job_path: Path, path: str) -> None:
    for key in ("logging.runs", "data.train"):
        with pytest.raises(InputError) as refused:
            load_job(job_path, [f"{key}={path}"])
        assert f"{key}: {path} is taken as it stands" in str(refused.value)
    for name in (f"./{path}", "a$b", "$1", "a/~b", "a~"):  # within a name they are characters of it
        runs = f"{job_path.parent}/{name.removeprefix('./')}"
        assert load_job(job_path, [f"logging.runs={name}"]).logging.runs == runs


def test_presets_are_valid_explain_themselves_and_set_no_key_without_effect(tmp_path: Path) -> None:
    presets = [line.split()[0] for line in clipship("init", "--list").out.splitlines() if line.strip()]
    assert len(presets) >= 4
    for name in presets:
        path = tmp_path / f"{name}.toml"
        assert clipship("init", "--preset", name, path).code == 0
        assert path.read_text().count("#") >= 20
        found = json.loads(clipship("check", path, "--no-data", "--json").out)
        assert (found["ok"], found["no_effect"]) == (True, {})


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
