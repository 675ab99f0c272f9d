"""The command line: what goes to stdout, what to stderr, which exit code; and that it stays light."""

import errno
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainer.cli.main import cli, main
from trainer.data.shard_files import write_shard
from trainer.presets import files as presets

ROOT = Path(__file__).parents[2]

Capture = pytest.CaptureFixture[str]

SYNTHETIC = (
    'name = "x"\n[data]\nformat = "synthetic"\n[model]\nname = "ViT-S-32-alt"\n[optim]\n'
    "global_batch_size = 32\nepochs = 2\n"
)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def job() -> str:
    Path("job.toml").write_text(SYNTHETIC)
    return "job.toml"


@pytest.fixture
def cluster() -> None:
    """The job file of a job for nodes, whose files this machine does not have."""
    Path("job.toml").write_text(CLUSTER)


def check(*overrides: str, options: Sequence[str] = ()) -> int:
    """Checks job.toml with these words of `--set`."""
    words = (word for override in overrides for word in ("--set", override))
    return main(["check", "job.toml", *options, *words])


NO_DATA = ["--no-data"]
IMAGE = ("slurm.container=pyxis", "image.tag=ours/clip:1")


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


@pytest.mark.parametrize("name", presets.preset_names())
def test_init_writes_the_preset_and_says_what_is_next(name: str, capsys: Capture) -> None:
    assert main(["init", "--preset", name, "my.toml"]) == 0
    own_name = presets.preset_text(name).replace("job.toml", "my.toml").replace("cc3m.toml", "my.toml")
    assert Path("my.toml").read_text() == presets.schema_line() + own_name
    assert capsys.readouterr() == ("", "wrote my.toml; next: clipship check my.toml\n")


def test_init_never_replaces_a_file_unless_forced(capsys: Capture) -> None:
    Path("job.toml").write_text("mine")
    assert main(["init", "--preset", "laptop"]) == 2
    assert Path("job.toml").read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main(["init", "--preset", "laptop", "--force"]) == 0
    assert Path("job.toml").read_text() == presets.schema_line() + presets.preset_text("laptop")
    assert files() == ["job.toml"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("init", "chinese, finetune, gpu, kubernetes, laptop, slurm"),
        ("init --preset lapto", "'laptop'"),
        ("init --preset laptop job.toml/job.toml", "cannot be written: File exists"),
        ("init --preset laptop .", "is a folder"),
        ("check", "Missing argument 'JOB'"),
        ("check no.toml", "no.toml: no such job file"),
        ("check job.toml --nproc 0", "--nproc"),
        ("check job.toml --nproc 3", "cannot be shared equally by 3 ranks"),
        ("check job.toml --set optim.rl=1", "--set optim.rl: unknown key; did you mean optim.lr?"),
        ("check job.toml --set model.name=ViT-B-33", "did you mean ViT-B-32"),
        ("check job.toml --set optim.global_batch_size=2048", "the data has 1,024 samples, fewer"),
        ("check job.toml --set data.format=auto --set data.train=", "names no shards and no table"),
        (
            "check job.toml --set data.format=webdataset --set data.train=no/*.tar",
            "no/*.tar: no file matches",
        ),
        ('check job.toml --set data.format=webdataset --set data.train=""', "must not be empty"),
        ("check job.toml --set logging.runs=job.toml", "is a file"),
        (
            (
                "check job.toml --set comm.backend=horovod --set comm.launcher=clipship "
                "--set comm.horovod.cpu_operations=mpi"
            ),
            "comm.horovod.cpu_operations = mpi needs comm.launcher = mpirun",
        ),
        ("check job.toml --set checkpoint.resume=nowhere", "there is no checkpoint at"),
        (
            "check job.toml --set data.format=webdataset --set data.train=x.parquet",
            "x.parquet is a Parquet file among shards: name only files of one format",
        ),
        ("run job.toml --nproc 2 --hosts a:1", "give either --nproc or --hosts"),
        ("run job.toml --hosts a:b", "a:b"),
        ("run job.toml --nproc 3", "cannot be shared equally by 3 ranks"),
        ("frobnicate", "No such command 'frobnicate'"),
    ],
)
def test_bad_input_is_one_message_with_exit_code_2_and_nothing_written(
    job: str, arguments: str, expected: str, capsys: Capture
) -> None:
    Path("x.parquet").touch()
    before = files()
    assert main(arguments.split()) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert files() == before


def test_check_says_what_will_run_and_writes_nothing(
    job: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.sysinfo.accelerators.exists", lambda _path: False)
    assert check("optim.max_batch_size_per_gpu=8", "name=two words", options=["--nproc", "2"]) == 0
    shown = re.sub(r"the CPU, .* memory", "the CPU, ...", capsys.readouterr().out)
    shown = re.sub(r"Python 3.*", "Python ...", re.sub(r"[\d,]+ fit the .* GB free", "... fit", shown))
    assert shown == (
        "job         two words, seed 0\n"
        "model       ViT-S-32-alt, fp32, clip loss\n"
        "data        synthetic, 1,024 samples per epoch\n"
        "world       2 ranks on this machine\n"
        "device      the CPU, ... (this machine has no GPU, and the job asks for none)\n"
        "environment Python ...\n"
        "batch       32 = 2 ranks x 2 micro-batches x 8 samples (max_batch_size_per_gpu = 8)\n"
        "backend     torch, ranks started by clipship (auto)\n"
        "steps       64 = 2 epochs x 32 steps\n"
        "learning    lr 0.0005 after 0 warm-up steps, then a cosine to 0\n"
        "optimizer   adamw, beta1 0.9, beta2 0.98, eps 1e-06; weight decay 0.2, not on gains, biases "
        "and the logit scale\n"
        "evaluation  none ([eval] names no data)\n"
        f"run folder  {tmp_path}/runs/two words\n"
        f"checkpoints 519 MB each (weights 173 MB, optimizer 346 MB), 3 kept; ... fit in {tmp_path}\n"
        "stop        at least 2.1 s from a request to the saved checkpoint: 2 steps, whose time is not known "
        "yet, and 519 MB at 0.25 GB/s (assumed)\n"
    )
    assert files() == ["job.toml"]


@pytest.mark.parametrize(
    ("overrides", "device"),
    [
        (
            ["resources.gpus_per_node=2"],
            "a GPU for each rank; a rank without one ends the run (resources.gpus_per_node = 2)",
        ),
        (["resources.gpus_per_node=2", "resources.device=cpu"], 'the CPU, ... (resources.device = "cpu")'),
        (["resources.gpus_per_node=0"], "the CPU, ... (resources.gpus_per_node = 0)"),
    ],
)
def test_check_names_the_device_and_warns_where_there_is_none(
    job: str, overrides: list[str], device: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.sysinfo.accelerators.exists", lambda _path: False)
    assert check(*overrides) == 0
    shown = re.sub(r"the CPU, .* memory", "the CPU, ...", capsys.readouterr().out)
    assert f"device      {device}\n" in shown
    assert ("but this machine has no GPU" in shown) == device.startswith("a GPU")


def test_check_of_ranks_on_this_machine_refuses_a_job_that_asks_for_gpus_where_there_are_none(
    job: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.sysinfo.accelerators.exists", lambda _path: False)
    here = ["--nproc", "2"]
    assert check("resources.gpus_per_node=2", "model.name=ViT-B-33", options=here) == 2
    told = capsys.readouterr().err
    assert "resources.gpus_per_node = 2, but this machine has no GPU" in told
    assert "unknown model 'ViT-B-33'" in told
    assert check("resources.gpus_per_node=2", "resources.device=cpu", options=here) == 0


CLUSTER = """
name = "far"
[data]
train = "/far/{00..09}.tar"
[model]
name = "ViT-B-32"
[optim]
global_batch_size = 1024
epochs = 2
[resources]
nodes = 2
gpus_per_node = 4
[logging]
runs = "/far/runs"
[eval]
retrieval = "/far/eval.tar"
[slurm]
partition = "gpu"
"""


PODS = """
[image]
tag = "registry.example/clipship:1"
[kubernetes.mounts]
"/far" = "pvc:far"
[kubernetes]
"""


def test_check_without_data_says_what_will_run_where_only_nodes_see_it(
    cluster: None, capsys: Capture
) -> None:
    assert check() == 2
    assert "`clipship check --no-data`" in capsys.readouterr().err
    assert check(options=NO_DATA) == 0
    shown = capsys.readouterr().out
    assert "data        not checked: /far/{00..09}.tar\n" in shown
    assert "backend     torch, ranks started by srun ([slurm])\n" in shown
    assert "evaluation  retrieval on /far/eval.tar, " in shown


@pytest.mark.parametrize(
    ("scheduler", "way"),
    [
        ("", "MPI"),
        ("[recovery]\nmax_restarts = 3", "Gloo"),
        ("[slurm]\npartition = 'gpu'\n[recovery]\nmax_restarts = 3", "Gloo"),
        ("[slurm]\npartition = 'gpu'\nlauncher = 'mpirun'", "MPI"),
        (f"{PODS}kind = 'mpijob'", "MPI"),
        (f"{PODS}kind = 'job'", "Gloo"),
    ],
)
def test_check_says_what_connects_horovods_ranks(capsys: Capture, scheduler: str, way: str) -> None:
    without = CLUSTER.partition("[slurm]")[0]
    Path("job.toml").write_text(f'{without}[comm]\nbackend = "horovod"\n{scheduler}\n')
    assert check(options=NO_DATA) == 0
    assert f"backend     horovod over {way}, ranks started by " in capsys.readouterr().out


def test_check_looks_at_the_files_that_the_image_is_built_from(cluster: None, capsys: Capture) -> None:
    words = ["image.tag=ours/clip:1", 'image.site.certificates=["no.pem"]']
    assert check(*words) == 2
    assert f"image.site.certificates: {Path('no.pem').absolute()}: No such file" in capsys.readouterr().err
    assert check(*words, options=NO_DATA) == 0
    assert check(*words, f"image.tag=ours/clip@sha256:{64 * '0'}") == 2  # for the shards
    assert "image.site" not in capsys.readouterr().err, "the image is built already"


@pytest.mark.parametrize("override", ["image.tag=ours/clip:1", "image.mpi=pypi"])
def test_check_refuses_a_stack_that_cannot_be_built_whether_the_image_has_a_name_or_not(
    cluster: None, override: str, capsys: Capture
) -> None:
    assert check(override, 'stack.archs=["7.0"]', options=NO_DATA) == 2
    assert "stack.archs: the wheel of torch" in capsys.readouterr().err


def test_check_warns_of_what_is_known_bad_in_a_stack(cluster: None, capsys: Capture) -> None:
    for setting, warns in (
        ("stack.torch=2.13.0", True),
        ('env.NCCL_PXN_DISABLE="1"', False),
        ('image.env.NCCL_PXN_DISABLE="1"', False),
        ('env.NCCL_PXN_DISABLE="0"', True),
    ):
        assert check(*IMAGE, "stack.torch=2.13.0", setting, options=NO_DATA) == 0
        shown = capsys.readouterr().out
        assert ("warning     torch 2.13.0: NCCL 2.29.7 may hang" in shown) == warns
        assert ("NCCL 2.29.7 may hang" in shown) == warns
    assert check(*IMAGE, options=NO_DATA) == 0
    assert "2.14.1:" not in capsys.readouterr().out


@pytest.mark.parametrize("compiled", ["true", "false"])
def test_check_warns_of_a_torch_that_compiles_wrongly(
    cluster: None, compiled: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "torch 2.13.0: compiled, the image tower of SigLIP B/16 gets wrong gradients"
    assert check(*IMAGE, "stack.torch=2.13.0", f"model.compile={compiled}", options=NO_DATA) == 0
    assert (text in capsys.readouterr().out) == (compiled == "true")
    monkeypatch.setattr("trainer.plan.describe.installed", lambda _: "2.13.0+cu130")
    Path("job.toml").write_text(SYNTHETIC)  # for this machine's own torch
    assert check(f"model.compile={compiled}", options=["--nproc", "1"]) == 0
    assert (text in capsys.readouterr().out) == (compiled == "true")


@pytest.mark.parametrize(
    ("release", "warns"), [("3.3.0", False), ("4.0.1", True), ("3.2", True), ("", False)]
)
def test_check_warns_of_an_open_clip_that_was_not_tried(
    job: str, release: str, warns: bool, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does `doctor`, by the preflight."""
    monkeypatch.setattr(
        "trainer.plan.describe.installed", lambda package: release if "clip" in package else "2.14.1"
    )
    assert check(options=["--nproc", "1"]) == 0
    said = f"open_clip_torch {release} is none of the releases" in capsys.readouterr().out
    assert said == warns


@pytest.mark.parametrize("form", ["slurm", "kubernetes"])
def test_a_digest_in_the_image_s_name_reaches_script_and_manifest(form: str, capsys: Capture) -> None:
    name = "registry.example/team/clipship@sha256:" + "0123456789abcdef" * 4
    assert main(["init", "--preset", form]) == 0
    container = ["--set", "slurm.container=pyxis"] if form == "slurm" else []
    assert main(["render", form, "job.toml", "--set", f"image.tag={name}", *container]) == 0, (
        capsys.readouterr().err
    )
    assert name.partition("/")[2] in capsys.readouterr().out


def test_check_refuses_what_cannot_run_on_slurm(cluster: None, capsys: Capture) -> None:
    assert check("slurm.container=pyxis", "resources.nodes=3", options=NO_DATA) == 2
    problems = capsys.readouterr().err
    assert "needs an image" in problems
    assert "--no-data" not in problems  # that is what was called
    assert problems.count("cannot be shared equally by 12 ranks") == 1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "logging.wandb=online",
            'needs the package wandb, which the image has only with image.pip_packages = ["wandb"]',
        ),
        ("data.train=s3://bucket/{0..9}.tar", "needs the package s3fs"),
    ],
)
def test_check_warns_of_packages_that_the_image_lacks(
    cluster: None, override: str, said: str, capsys: Capture
) -> None:
    assert check(*IMAGE, override, options=NO_DATA) == 0
    assert said in capsys.readouterr().out
    packages = 'image.pip_packages=["wandb==0.19.1", "s3fs"]'
    assert check(*IMAGE, override, packages, options=NO_DATA) == 0
    assert said not in capsys.readouterr().out


def test_render_says_which_paths_pods_cannot_see(capsys: Capture) -> None:
    Path("job.toml").write_text(
        CLUSTER.replace('[slurm]\npartition = "gpu"', '[kubernetes]\nmounts."/far/runs" = "pvc:runs"')
    )
    assert main(["render", "kubernetes", "job.toml", "--set", "image.tag=clip:1"]) == 0
    shown = capsys.readouterr()
    assert "kind: Job" in shown.out
    assert "warning: /far/{00..09}.tar is on no volume" in shown.err


@pytest.mark.parametrize(("kind", "key"), [("slurm", "name"), ("dockerfile", "image.env.NOTE")])
def test_render_writes_utf_8_whatever_the_terminal_has(
    cluster: None, kind: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    arguments = [kind, "job.toml", "--set", f"{key}=\u8bad\u7ec3", "--set", "image.tag=clip:1"]
    assert main(["render", *arguments]) == 0
    assert "\u8bad\u7ec3" in written.getvalue().decode()


def test_check_says_that_shards_without_record_are_counted_later(job: str, capsys: Capture) -> None:
    for number in (1, 2):
        write_shard([("k", {"png": b"png", "txt": b"text"})], Path(f"{number}.tar"))
    assert check("data.format=auto", "data.train=*.tar") == 0
    shown = capsys.readouterr().out
    assert "2 shards, samples are counted at the start" in shown
    assert "steps       2 epochs; samples are counted at the start" in shown


def test_check_says_how_many_samples_an_epoch_leaves_out(job: str, capsys: Capture) -> None:
    assert check("data.synthetic_samples=70") == 0
    assert "steps       4 = 2 epochs x 2 steps; 6 samples of each epoch left out\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.global_batch_size=8", "a global batch of 8"),
        ("optim.warmup_steps=65", "warmup_steps 65 is longer than the run of 64 steps"),
        (
            "optim={global_batch_size=32, steps=64, warmup_steps=65}",
            "warmup_steps 65 is longer than the run of 64 steps",
        ),
        ("model={name='ViT-S-32-alt', lock_image=true, lock_text=true}", "both towers are locked"),
    ],
)
def test_check_warns_of_what_is_seldom_meant(job: str, override: str, expected: str, capsys: Capture) -> None:
    assert check() == 0
    assert "warning" not in capsys.readouterr().out
    assert check(override) == 0
    assert f"warning     {expected}" in capsys.readouterr().out


def test_the_laptop_preset_passes_its_check_as_it_is(capsys: Capture) -> None:
    assert main(["init", "--preset", "laptop"]) == 0
    assert check(options=["--nproc", "2"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_init_lists_presets_on_stdout_and_makes_the_folders_of_a_job_file(capsys: Capture) -> None:
    assert main(["init", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == presets.preset_names()
    assert main(["init", "--preset", "laptop", "sub/dir/job.toml"]) == 0
    assert Path("sub/dir/job.toml").is_file()


def test_every_command_is_listed_explained_and_shows_an_example(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in cli.list_commands(None):  # type: ignore[arg-type]
        assert f"\n  {name} " in listed
        assert main([name, "--help"]) == 0
        assert f"clipship {name}" in capsys.readouterr().out.split("Examples:")[1]


@pytest.mark.parametrize(
    ("section", "launcher"),
    [
        ("[slurm]", "srun ([slurm])"),
        ('[kubernetes.mounts]\n"/tmp" = "pvc:runs"', "their pods ([kubernetes])"),
        ('[kubernetes]\nkind = "mpijob"\nmounts."/tmp" = "pvc:runs"', "mpirun ([kubernetes])"),
    ],
)
def test_one_node_of_a_cluster_is_not_this_machine(capsys: Capture, section: str, launcher: str) -> None:
    without = CLUSTER.partition("[slurm]")[0].replace("/far/runs", "/tmp/runs")
    Path("job.toml").write_text(f"{without}{section}\n")
    assert check("resources.nodes=1", "resources.gpus_per_node=2", "image.tag=a/b:1", options=NO_DATA) == 0
    shown = capsys.readouterr().out
    assert "2 ranks: 1 node of 2 GPUs ([resources])\n" in shown
    assert launcher in shown


def test_check_names_spare_nodes_beside_the_world(cluster: None, capsys: Capture) -> None:
    assert check("recovery.max_restarts=3", "recovery.spare_nodes=1", options=NO_DATA) == 0
    world = "8 ranks: 2 nodes of 4 GPUs ([resources]), and 1 spare node (recovery.spare_nodes): 3 nodes "
    assert f"world       {world}" in capsys.readouterr().out


def test_fresh_moves_nothing_where_the_run_cannot_begin(job: str, capsys: Capture) -> None:
    run = Path("runs", "mine")
    run.mkdir(parents=True)
    (run / "job.toml").write_text("of another job")
    assert main(["run", job, "--nproc", "7", "--fresh", "--set", "name=mine"]) == 2
    assert "another job" not in capsys.readouterr().err
    assert [path.name for path in Path("runs").iterdir()] == ["mine"]


def raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Lets the check of a job end so."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("trainer.plan.check.check_job", fail)


def test_a_bug_keeps_its_traceback(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raises(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        check()


def test_an_interrupt_is_quiet_but_for_a_run_which_says_that_none_began(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    raises(monkeypatch, KeyboardInterrupt())
    assert check() == 130
    assert capsys.readouterr().err.strip() == ""
    assert main(["run", job]) == 130
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    assert said == [f"clipship: reading {job}", "clipship: Ctrl-C: nothing was started"]


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EACCES, 2), (errno.EROFS, 2), (errno.EDQUOT, 1), (errno.EIO, 1)]
)
def test_what_the_system_refuses_is_one_sentence(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture, number: int, code: int
) -> None:
    raises(monkeypatch, OSError(number, os.strerror(number), "/home/another/job.toml"))
    assert check() == code
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"clipship: /home/another/job.toml: {os.strerror(number)}"


@pytest.mark.parametrize(
    ("stdout", "code", "told"),
    [(">/dev/full", 1, f"clipship: {os.strerror(errno.ENOSPC)}\n"), (">&-", 0, ""), ("<&- >&-", 0, "")],
)
def test_stdout_that_is_full_or_closed_gives_no_traceback(stdout: str, code: int, told: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m trainer.cli stacks {stdout}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (code, told)


HEAVY = ("torch", "numpy", "open_clip", "webdataset", "horovod")


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--help"], (*HEAVY, "pydantic", "trainer.config.job", "importlib.metadata")),
        (["runs"], (*HEAVY, "trainer.config.job")),
        (["render", "dockerfile", "job.toml"], HEAVY),
        (
            ["check", "job.toml", "--set", "data.format=table", "--set", "data.train=t.csv"],
            ("torch", "open_clip", "webdataset", "horovod"),
        ),
    ],
)
def test_commands_of_the_login_node_import_nothing_heavy(
    job: str, arguments: list[str], unwanted: tuple[str, ...]
) -> None:
    Path("t.csv").write_text("image,caption\n" + "job.toml,a\n" * 32)
    program = (
        "import sys; from trainer.cli.entry import main; unwanted = sys.argv.pop(1).split(','); "
        "print(main(), *[name for name in unwanted if name in sys.modules], file=sys.stderr)"
    )
    words = [sys.executable, "-c", program, ",".join(unwanted), *arguments]
    ran = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert ran.stderr.splitlines()[-1] == "0"


def test_plugins_of_pydantic_that_happen_to_be_installed_are_not_loaded(tmp_path: Path, job: str) -> None:
    (tmp_path / "changing-1.dist-info").mkdir()
    (tmp_path / "changing-1.dist-info" / "entry_points.txt").write_text(
        "[pydantic]\nchanging = changing:plugin\n"
    )
    (tmp_path / "changing-1.dist-info" / "METADATA").write_text("Name: changing\nVersion: 1\n")
    (tmp_path / "changing.py").write_text("raise SystemExit('loaded')")
    words = [sys.executable, "-m", "trainer.cli", "check", job, "--no-data"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("module", ["trainer.cli", "trainer.cli.main"])
def test_python_m_is_the_command_whose_version_goes_to_stdout(module: str) -> None:
    words = [sys.executable, "-P", "-m", module, "--version"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("clipship ")
