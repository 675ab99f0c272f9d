"""The job file: what is read, what is refused and how, what is written."""

import json
import re
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.command_line import clipship
from trainer.config import Job, is_stream
from trainer.config.loader import dump_job, dump_without_secrets, load_job, resolve_paths
from trainer.config.toml_lines import key_lines
from trainer.errors import InputError

SMALLEST = 'name = "x"\n[data]\ntrain = "a.tar"\n[optim]\nglobal_batch_size = 8\nsteps = 2\n'

OF_A_SHELL = re.compile(r"\$\{|\$[A-Za-z_]|~[^/]|~\Z")
"""Beginning of a path that is refused."""
text = st.text(min_size=1, max_size=30).filter(
    lambda value: "\x00" not in value and not OF_A_SHELL.match(value)
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


@pytest.mark.parametrize(
    ("key", "hatch"),
    [
        ("slurm.mail_type", "If it is an option of sbatch, give it as slurm.extra.mail-type"),
        ("slurm.exclusive", "did you mean slurm.exclude? If it is an option of sbatch, "),
        (
            "kubernetes.seccomp",
            "If it is a field of a pod, or of the object that runs the pods, set it in kubernetes.patch",
        ),
        (
            "comm.nccl.debug",
            "has: socket_ifname, ib_hca. If it is a variable of NCCL, set it in [env]: NCCL_DEBUG",
        ),
        ("comm.horovod.cache_capacity", "set it in [env]: HOROVOD_CACHE_CAPACITY"),
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
    assert "job.toml: optim: missing; a job needs the section [optim] with global_batch_size" in problems(
        job_path, "name = 'x'"
    )


def of_data(job_path: Path, line: str) -> list[str]:
    """Returns the problems of a job with one more line in [data]."""
    return problems(job_path, SMALLEST.replace('train = "a.tar"', f'train = "a.tar"\n{line}'))


def test_data_without_files_is_refused_but_for_synthetic(job_path: Path) -> None:
    content = SMALLEST.replace('train = "a.tar"', "workers = 0")
    assert problems(job_path, content)[0].startswith("job.toml:2: data: train names no shards and no table")
    assert load_job(job_path, ["data.format=synthetic"]).data.kind == "synthetic"


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


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"name = '\xff'")
    for path, expected in (
        (tmp_path / "no.toml", "clipship init"),
        (tmp_path, "is a folder"),
        (tmp_path / "binary.toml", "not UTF-8"),
    ):
        assert expected in clipship("check", path).err


def test_a_byte_order_mark_is_passed_over(job_path: Path) -> None:
    job_path.write_bytes(b"\xef\xbb\xbf" + SMALLEST.encode())
    assert load_job(job_path).name == "x"


def test_overrides_are_read_as_toml_else_as_text(job_path: Path) -> None:
    words = ["optim.lr=1e-3", "name=it is = mine", "data.train=['a','b']", "slurm.time=12:30:00"]
    job = load_job(job_path, words)
    assert (job.optim.lr, job.name, job.slurm.time) == (1e-3, "it is = mine", "12:30:00")
    assert [Path(name).name for name in job.data.train] == ["a", "b"]
    assert load_job(job_path, ["comm.torch.bucket_mb=4"]).comm.torch.bucket_mb == 4


def test_the_last_override_wins_and_an_empty_one_takes_the_default(job_path: Path) -> None:
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


def test_what_is_typed_without_quotes_is_text_where_text_is_wanted(job_path: Path) -> None:
    words = ["name=2024", "slurm.account=0.10", "env.OMP_NUM_THREADS=4", "stack.cuda=13.0"]
    job = load_job(job_path, [*words, 'kubernetes.mounts."/data"=pvc:a'])
    assert (job.name, job.slurm.account, job.stack.cuda) == ("2024", "0.10", "13.0")
    assert job.env == {"OMP_NUM_THREADS": "4"}
    assert job.kubernetes.mounts == {"/data": "pvc:a"}


@pytest.mark.parametrize(
    ("times", "taken"),
    [
        (["90", "30:00", "12:30:00", "2-12", "2-12:30", "2-12:30:00", "0-00:10"], True),
        (["12h", "1:60", "2-24", "2-", "-1", "1:2:3", "1:00:00:00", "90\n", "٣", "1 day"], False),
    ],
)
def test_times_of_slurm_are_taken_and_others_refused_with_the_forms(
    job_path: Path, times: list[str], taken: bool
) -> None:
    for length in times:
        if taken:
            assert load_job(job_path, [f'slurm.time="{length}"']).slurm.time == length
        else:
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
    steps = draw(positive)
    finite = st.floats(min_value=1e-12, max_value=1e6)
    return Job.model_validate(
        {
            "name": draw(st.from_regex(r"[A-Za-z0-9 '\"\\$`#é-]{0,20}x", fullmatch=True).map(str.strip)),
            "seed": draw(st.integers(min_value=0, max_value=2**31 - 1)),
            "data": {
                "train": draw(texts.filter(lambda names: not any(map(is_stream, names)))),
                "separator": draw(st.sampled_from([None, "\t", ";"])),
                "crop_scale": (draw(st.floats(0.01, 1)), 1.0),
            },
            "model": {
                "name": draw(text),
                "pretrained": draw(st.none() | text),
                "lock_image": draw(st.booleans()),
            },
            "optim": {
                "global_batch_size": draw(positive),
                "steps": steps,
                "lr": draw(finite),
                "grad_clip_norm": draw(st.none() | finite),
            },
            "comm": {"nccl": {"socket_ifname": draw(st.none() | text)}, "torch": {"bucket_mb": draw(finite)}},
            "eval": {"class_names": draw(text | texts)},
            "logging": {"runs": draw(text)},
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


@pytest.mark.parametrize("named", [(), ("slurm",), ("slurm", "kubernetes")])
def test_what_is_dumped_names_the_schedulers_that_the_file_names(
    job_path: Path, named: tuple[str, ...]
) -> None:
    job_path.write_text(SMALLEST + "".join(f"[{name}]\n" for name in named))
    job = load_job(job_path)
    for dumped in (dump_job(job), dump_without_secrets(job)):
        job_path.write_text(dumped)
        again = load_job(job_path)
        assert tuple(again.schedulers) == named
        assert again.offline == bool(named)


@settings(deadline=None)
@given(
    keys=st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    values=st.lists(text, min_size=4, max_size=4),
)
def test_lines_of_quoted_keys_are_found_after_values_of_several_lines(
    keys: list[str], values: list[str]
) -> None:
    def quoted(value: str) -> str:
        return '"' + "".join(f"\\U{ord(c):08x}" for c in value) + '"'

    lines = ["# [no.section] = 1"]
    expected = {}
    for key, value in zip(keys, values, strict=False):
        expected[key,] = len(lines) + 1
        lines += [f"{quoted(key)} = [ # ]", f"  {quoted(value)}, ''']''', '''", 'a = "1"', "''' ]", ""]
    content = "\n".join(lines)
    assert list(tomllib.loads(content)) == keys
    assert key_lines(content) == expected


def test_lines_of_headers_and_dotted_keys_are_found() -> None:
    content = 'a = 1\n[b.c] # x\nd."e.f" = { g = 1 }\n\n[ "h i" ]\nj = """\nk = 1\n"""\n'
    found = {"a": 1, "b c": 2, "b c d e.f": 3, "h i": 5, "h i j": 6}
    assert {" ".join(key): line for key, line in key_lines(content).items()} == found


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
    "line",
    [
        "a." * 900 + "a = 1",
        "kubernetes.patch.worker." + "a." * 900 + "a = 1",
        "[" + "a." * 900 + "a]",
        "x = {" + "a." * 900 + "a = 1}",
        '"x" = {' + '"a".' * 900 + "a = 1}",
        "x = " + "{a=" * 90 + "1" + "}" * 90,
        "x = " + "[" * 90 + "]" * 90,
        "a." * 200_000 + "a = 1",
    ],
)
def test_what_is_nested_too_deeply_is_refused_with_its_line(job_path: Path, line: str) -> None:
    (told,) = problems(job_path, f'name = "x"\n{line}\n')
    assert re.match(r"job\.toml:2: .*(nested more than 64 levels|a key with more than 64 parts)", told)


def test_an_override_of_too_many_parts_is_refused(job_path: Path) -> None:
    (told,) = problems(job_path, SMALLEST, f"{'a.' * 900}a=1")
    assert "nested more than 64 levels deep" in told
    assert len(told) < 300


def test_many_unknown_keys_are_told_soon_and_counted(job_path: Path) -> None:
    begin = time.monotonic()
    told = problems(
        job_path, "".join(f"unknown_key_{n} = 1\n" for n in range(3000)) + SMALLEST.replace('"x"', "1")
    )
    assert time.monotonic() - begin < 15  # a hint for each of them takes minutes
    assert told[0].startswith("job.toml:1: unknown_key_0: unknown key; ")
    assert told[-1] == "and 2,901 more problems"
    assert len(told) == 101


def test_a_name_of_a_whole_book_is_told_shortened(job_path: Path) -> None:
    (told,) = problems(job_path, f"{SMALLEST}[{'n' * 200_000}]\n")
    assert told == f"job.toml:7: {'n' * 97}...: unknown key"


@pytest.mark.parametrize("key", ["seed", "env.X", "slurm.extra.x", "kubernetes.patch.worker.x"])
def test_a_number_of_thousands_of_digits_is_refused(job_path: Path, key: str) -> None:
    (told,) = problems(job_path, f"{key} = 0x{'f' * 9000}\n{SMALLEST}")
    assert (
        told
        == f"job.toml:1: {key}: a number of more than 64 bits; TOML has whole numbers from -2^63 to 2^63 - 1"
    )


def test_a_file_too_large_for_a_job_is_not_read(job_path: Path) -> None:
    (told,) = problems(job_path, "#" * 1_000_001)
    assert "1,000,001 bytes and is not a job file" in told


def test_a_start_reads_a_job_that_is_larger_than_the_users_file(tmp_path: Path) -> None:
    """Absolute paths and defaults make it so, with a list of shards."""
    folder = tmp_path / ("storage" * 12)
    folder.mkdir()
    shards = [f"shards/{number:06}.tar" for number in range(9000)]
    (folder / "job.toml").write_text(SMALLEST.replace('"a.tar"', json.dumps(shards)))
    job = load_job(folder / "job.toml")
    own = tmp_path / "start-1.toml"
    own.write_text(dump_job(job))
    assert own.stat().st_size > 1_000_000 > (folder / "job.toml").stat().st_size
    assert load_job(own) == job
    with own.open("ab") as file:
        file.truncate(16_000_001)
    with pytest.raises(
        InputError, match="16,000,001 bytes and is not a job file, which has at most 16,000,000"
    ):
        load_job(own)
    own.write_bytes(own.read_bytes()[1:1_000_002])
    with pytest.raises(InputError, match="which has at most 1,000,000"):
        load_job(own)


@pytest.mark.parametrize(
    "line",
    [
        'seed = "\\u001b[2J"',
        '"\\u001b[2J\\u0000" = 1',
        'model.precision = "\\u0000\\u202e"',
        'seed = "a\\nb"',
    ],
)
def test_no_value_acts_on_the_terminal(job_path: Path, line: str) -> None:
    (told,) = problems(job_path, f"{line}\n{SMALLEST}")
    assert told.isprintable()


def test_a_password_is_masked_before_a_value_is_cut_short(job_path: Path) -> None:
    (told,) = problems(job_path, f'seed = "https://user:s3cr3t{"x" * 100}@host/"\n{SMALLEST}')
    assert told == 'job.toml:1: seed: expected a whole number (given "https://***@host/")'


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
