"""The command line: what goes to stdout, what to stderr, which exit code; and that it stays light."""

import ast
import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import trainer.cli
from tests.support.command_line import clipship
from tests.support.jobs import VIT, tiny_job
from trainer.cli.main import cli, main
from trainer.config.loader import dump_job
from trainer.model.build import untrained
from trainer.sysinfo.extras import EXTRAS

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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("init", "chinese, finetune, gpu, kubernetes, laptop, slurm"),
        ("init --preset laptop job.toml/job.toml", "cannot be written: File exists"),
        ("check", "Missing argument 'JOB'"),
        ("check no.toml", "no.toml: no such job file"),
        ("check job.toml --set model.name=ViT-B-33", "did you mean ViT-B-32"),
        ("check job.toml --set optim.global_batch_size=2048", "the data has 1,024 samples, fewer"),
        ("check job.toml --set data.format=webdataset --set data.train=no/*.tar", "no/*.tar: no file match"),
        ("check job.toml --set logging.runs=job.toml", "is a file"),
        ("check job.toml --set checkpoint.resume=nowhere", "there is no checkpoint at"),
        (
            "check job.toml --set data.format=webdataset --set data.train=x.parquet",
            "x.parquet is a Parquet f",
        ),
        ("run job.toml --nproc 2 --hosts a:1", "give either --nproc or --hosts"),
        ("run job.toml --hosts a:b", "a:b"),
        ("frobnicate", "No such command 'frobnicate'"),
    ],
)
def test_bad_input_is_one_message_with_exit_code_2_and_nothing_written(
    job: str, arguments: str, expected: str
) -> None:
    Path("x.parquet").touch()
    before = files()
    shown = clipship(*arguments.split(), code=2)
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


def test_check_of_ranks_on_this_machine_refuses_a_job_that_asks_for_gpus_where_there_are_none(
    job: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.sysinfo.accelerators.exists", lambda _path: False)
    assert check("resources.gpus_per_node=2", options=["--nproc", "2"]) == 2
    assert "resources.gpus_per_node = 2, but this machine has no GPU" in capsys.readouterr().err
    assert check("resources.gpus_per_node=2", "resources.device=cpu", options=["--nproc", "2"]) == 0


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


def test_check_looks_at_the_files_that_the_image_is_built_from(cluster: None, capsys: Capture) -> None:
    words = ["image.tag=ours/clip:1", 'image.site.certificates=["no.pem"]']
    assert check(*words) == 2
    assert f"image.site.certificates: {Path('no.pem').absolute()}: No such file" in capsys.readouterr().err
    assert check(*words, options=NO_DATA) == 0
    assert check(*words, f"image.tag=ours/clip@sha256:{64 * '0'}") == 2  # for the shards
    assert "image.site" not in capsys.readouterr().err, "the image is built already"


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


def test_check_warns_of_packages_that_the_image_lacks(cluster: None, capsys: Capture) -> None:
    override = "logging.wandb=online"
    said = 'needs the package wandb, which the image has only with image.pip_packages = ["wandb"]'
    assert check(*IMAGE, override, options=NO_DATA) == 0
    assert said in capsys.readouterr().out
    packages = 'image.pip_packages=["wandb==0.19.1"]'
    assert check(*IMAGE, override, packages, options=NO_DATA) == 0
    assert said not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.global_batch_size=8", "a global batch of 8"),
        ("optim.warmup_steps=65", "warmup_steps 65 is longer than the run of 64 steps"),
        ("model={name='ViT-S-32-alt', lock_image=true, lock_text=true}", "both towers are locked"),
    ],
)
def test_check_warns_of_what_is_seldom_meant(job: str, override: str, expected: str, capsys: Capture) -> None:
    assert check() == 0
    assert "warning" not in capsys.readouterr().out
    assert check(override) == 0
    assert f"warning     {expected}" in capsys.readouterr().out


def test_every_command_is_listed_explained_and_shows_an_example() -> None:
    listed = clipship("--help", code=0).out
    for name in cli.list_commands(None):  # type: ignore[arg-type]
        assert f"\n  {name} " in listed
        assert f"clipship {name}" in clipship(name, "--help", code=0).out.split("Examples:")[1]


def raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Lets the check of a job end so."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("trainer.plan.check.check_job", fail)


def test_an_interrupt_is_quiet_but_for_a_run_which_says_that_none_began(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    raises(monkeypatch, KeyboardInterrupt())
    assert check() == 130
    assert capsys.readouterr().err.strip() == ""
    assert main(["run", job]) == 130
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    assert said == [f"clipship: reading {job}", "clipship: Ctrl-C: nothing was started"]


@pytest.mark.parametrize(("number", "code"), [(errno.EROFS, 2), (errno.EDQUOT, 1)])
def test_what_the_system_refuses_is_one_sentence_and_a_bug_keeps_its_traceback(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture, number: int, code: int
) -> None:
    raises(monkeypatch, OSError(number, os.strerror(number), "/home/another/job.toml"))
    assert check() == code
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"clipship: /home/another/job.toml: {os.strerror(number)}"
    raises(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        check()


@pytest.mark.parametrize(
    ("stdout", "code", "told"),
    [(">/dev/full", 1, f"clipship: {os.strerror(errno.ENOSPC)}\n"), (">&-", 0, ""), ("<&- >&-", 0, "")],
)
def test_stdout_that_is_full_or_closed_gives_no_traceback(stdout: str, code: int, told: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m trainer.cli stacks {stdout}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (code, told)


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("--help", ["numpy", "pydantic", "trainer.config.job", "importlib.metadata"]),
        ("render dockerfile job.toml", ["numpy"]),
        ("check job.toml --set data.format=table --set data.train=t.csv", []),
        ("data stats t.csv", []),
        ("explain optim.lr", ["pydantic"]),
    ],
)
def test_commands_of_the_login_node_import_nothing_heavy(job: str, words: str, more: list[str]) -> None:
    Path("t.csv").write_text("image,caption\n" + "job.toml,a\n" * 32)
    unwanted = {"torch", "open_clip", "webdataset", "horovod", *more}
    program = (
        f"import sys; from trainer.cli.entry import main; unwanted = {unwanted}; "
        "print(main(), *unwanted & sys.modules.keys(), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", program, *words.split()], capture_output=True, text=True)
    assert ran.stderr.splitlines()[-1] == "0"


@pytest.mark.parametrize("module", ["trainer.cli", "trainer.cli.main"])
def test_python_m_is_the_command_whose_version_goes_to_stdout(module: str) -> None:
    words = [sys.executable, "-P", "-m", module, "--version"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("clipship ")


# The modules of commands


FOLDER = Path(trainer.cli.__path__[0])
SHARED = {"__init__", "__main__", "commands", "entry", "main", "options", "output", "suggested"}
MODULES = sorted({path.stem for path in FOLDER.glob("*.py")} - SHARED)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_the_command_line_is_one_command_and_prints_as_all_do(module: str) -> None:
    assert isinstance(import_module(f"trainer.cli.{module}").command, click.Command)
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not {"print", "json.dumps", "sys.exit"} & calls


# A command's exit code is its own, whatever becomes of its streams; its text suits locale and terminal.

CLIPSHIP = [sys.executable, "-m", "trainer.cli"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_has_gone_changes_no_exit_code(stream: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as nobody:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: nobody}
        shown = subprocess.run([*CLIPSHIP, "stacks"], **pipes)
        refused = subprocess.run([*CLIPSHIP, "check", "no-such-job.toml"], **pipes)
    assert (shown.returncode, refused.returncode) == (0, 2)


@pytest.mark.skipif(shutil.which("localedef") is None, reason="no localedef here")
def test_a_run_with_closed_streams_in_a_latin_1_locale_ends_well(tmp_path: Path) -> None:
    made = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(tmp_path / "en_US.ISO-8859-1")]
    subprocess.run(made, capture_output=True, check=True)
    job = tiny_job(name="猫咪", logging={"runs": str(tmp_path / "runs"), "tensorboard": False})
    (tmp_path / "job.toml").write_text(dump_job(job), encoding="utf-8")
    env = {**os.environ, "LOCPATH": str(tmp_path), "LC_ALL": "en_US.ISO-8859-1"}
    env.pop("PYTHONUTF8", None)
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *CLIPSHIP, "run", str(tmp_path / "job.toml")]
    code = subprocess.run(command, env=env).returncode
    result = json.loads((tmp_path / "runs" / "猫咪" / "result.json").read_text())
    assert (code, result["reason"]) == (0, "done")


def test_a_signal_while_a_line_is_written_does_not_write_it_twice() -> None:
    program = (
        "import itertools, signal\n"
        "from trainer.sysinfo.streams import outlive_readers\n"
        "def press(*_): raise KeyboardInterrupt\n"
        "signal.signal(signal.SIGALRM, press)\n"
        "outlive_readers()\n"
        "for number in range(3000):\n"
        "    try:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number % 60))\n"
        "        for part in itertools.count():\n"
        '            print(f"{number} {part}\\n", end="", flush=True)\n'
        "    except KeyboardInterrupt:\n"
        "        pass\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) > 3000
    assert len(set(lines)) == len(lines)


_INTERRUPTED_IMPORT = """\
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "trainer.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from trainer.cli.entry import main
sys.exit(main())
"""


_ESCAPE_PRINTED = """\
import sys
from trainer.cli import entry, main as command_line
command_line.main = lambda: print("d\\udcff") or 0
sys.exit(entry.main())
"""


def test_ctrl_c_during_the_imports_leaves_no_traceback() -> None:
    end = subprocess.run([sys.executable, "-c", _INTERRUPTED_IMPORT], capture_output=True, text=True)
    assert (end.returncode, end.stderr) == (130, "")


def test_a_name_that_is_no_utf_8_keeps_its_bytes_where_the_locale_passes_them() -> None:
    end = subprocess.run([sys.executable, "-c", _ESCAPE_PRINTED], env={"LC_ALL": "C"}, capture_output=True)
    assert end.stdout == b"d\xff\n", end.stderr


def test_what_the_terminals_encoding_lacks_is_escaped() -> None:
    printing = _ESCAPE_PRINTED.replace("\\udcff", "\\u8bad")
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    end = subprocess.run([sys.executable, "-c", printing], env=environment, capture_output=True)
    assert end.stdout == rb"d\u8bad" + b"\n", end.stderr


# Environments that lack an extra: a command does what it can, or says in one sentence what to install.

WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, *others):
        return None if name.partition(".")[0] in {modules!r} else self._finder.find_spec(name, *others)

sys.meta_path = [Without(finder) for finder in sys.meta_path]
"""
"""Begins a program that cannot import some modules."""


def run(code: str, *extras: str) -> subprocess.CompletedProcess[str]:
    modules = {module for extra in extras for module in EXTRAS[extra] if "." not in module}
    modules |= {"tokenizers"} if "text" in extras else set()  # transformers brings it
    program = WITHOUT.format(modules=modules) + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("form", "said"), [("open_clip", "wrote open_clip"), ("safetensors", "wrote"), ("hf", "clipship[text]")]
)
def test_export_without_the_extra_text(tmp_path: Path, form: str, said: str) -> None:
    torch.save(untrained(tiny_job()).model.state_dict(), tmp_path / "weights.pt")
    arguments = ["export", str(tmp_path / "weights.pt"), str(tmp_path / "out"), "--to", form, "--model", VIT]
    done = run(f"from trainer.cli.main import main; sys.exit(main({arguments!r}))", "text")
    assert "Traceback" not in done.stderr
    assert said in done.stderr
    assert done.returncode == (2 if form == "hf" else 0)
