"""Verifies that this environment is what its stack says.

It checks libraries, NCCL, MPI, Horovod, a model, and two ranks that train a step. The last stage of an
image's build runs it, and so does `clipship image verify`; it needs no GPU. stdout gets one JSON object with
the facts found, stderr one line for each check. The exit code is 0 if all checks hold, 1 if one does not.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import click

from trainer.config.loader import job_from_table
from trainer.config.stack_table import has_code
from trainer.launch.local import run
from trainer.launch.processes import stdout_is_stderr
from trainer.run.layout import RESULT_FILE

_HOROVOD_FEATURES = ("PyTorch", "MPI", "Gloo", "NCCL")
_RANK_MINUTES = 5
_SAME = 1e-4
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_STATE_HOME")
"""Variables with the folders of compiled kernels and of the list of runs, which the image must not keep.

Headers that torch has compiled lie in TMPDIR, whatever these say.
"""


class SelfTestFailed(Exception):
    """One check failed; the text says what was found and what was expected."""


@click.command()
@click.option("--torch", metavar="VERSION", help="Required version of torch.")
@click.option("--cuda", metavar="VERSION", help="CUDA version that torch must be built for.")
@click.option("--nccl", metavar="VERSION", help="Required version of the only NCCL in the process.")
@click.option(
    "--archs", metavar="LIST", help="Compute capabilities that torch must have code for, such as 8.0,9.0."
)
@click.option(
    "--gpus", metavar="LIST", help="Compute capabilities of the GPUs that torch must run on, such as 8.0,8.9."
)
@click.option("--torch-min", metavar="VERSION", help="Oldest allowed version of torch.")
@click.option("--compiler", is_flag=True, help="Require a compiler with which torch.compile works.")
@click.option(
    "--libraries",
    is_flag=True,
    hidden=True,
    help="Print only the libraries of a process after its imports.",
)
def main(libraries: bool, compiler: bool, **expected: str | None) -> None:
    """Verify this environment; without options the versions are recorded and not compared."""
    if libraries:
        print(json.dumps(_libraries()))
        return
    with tempfile.TemporaryDirectory(prefix="selftest-") as own:  # torch makes a folder as it is imported
        os.environ |= {"TMPDIR": own, **{name: str(Path(own, name)) for name in _FOLDERS}}
        try:
            facts = dict(
                _checks({name: value for name, value in expected.items() if value}, compiler=compiler)
            )
        except SelfTestFailed as problem:
            print(f"self-test: FAILED: {problem}", file=sys.stderr)
            sys.exit(1)
    print(json.dumps(facts, indent=2))


def _checks(expected: dict[str, str], *, compiler: bool) -> Iterator[tuple[str, Any]]:
    yield "horovod", _report("Horovod has", _check_build)
    libraries = _report("libraries", lambda: _checked_libraries(expected))
    yield from libraries.items()
    yield "mpi", _report("MPI", _mpi)
    losses = {
        "clipship": _report(
            "loss of a step by two ranks under clipship run", lambda: _step("clipship", "torch")
        ),
        "mpirun": _report(
            "loss of a step by two ranks under mpirun, over Horovod", lambda: _step("mpirun", "horovod")
        ),
    }
    if compiler:
        losses["compiled"] = _report(
            "loss of a step with torch.compile", lambda: _step("clipship", "torch", compiled=True)
        )
    if max(losses.values()) - min(losses.values()) > _SAME:
        raise SelfTestFailed(f"the losses of the same step differ between launchers: {losses}")
    yield "losses", losses


def _report(what: str, check: Callable[[], Any]) -> Any:
    result = check()
    print(f"self-test: {what}: {result}", file=sys.stderr, flush=True)
    return result


def _check_build() -> list[str]:
    """Returns the features that `horovodrun --check-build` marks as available."""
    has = re.findall(r"\[X\] (\S+)", _output(["horovodrun", "--check-build"]))
    missing = [name for name in _HOROVOD_FEATURES if name not in has]
    if missing:
        raise SelfTestFailed(
            f"horovodrun --check-build does not list {', '.join(missing)}; it lists {', '.join(has)}"
        )
    return has


def _mpi() -> str:
    return _output([_tool("mpirun"), "--version"]).splitlines()[0]


def _checked_libraries(expected: dict[str, str]) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(
        _output([sys.executable, "-P", "-m", "trainer.image.selftest", "--libraries"]).splitlines()[-1]
    )
    for name in ("torch", "cuda", "nccl"):
        if name in expected and facts[name] != expected[name]:
            raise SelfTestFailed(f"{name} is {facts[name]}, but the stack has {expected[name]}")
    if facts["cuda"] and not facts["nccl"]:
        raise SelfTestFailed(
            "torch and Horovod load no libnccl: this torch has NCCL built in, which Horovod cannot use"
        )
    if "torch_min" in expected and _minor(facts["torch"]) < _minor(expected["torch_min"]):
        raise SelfTestFailed(
            f"torch is {facts['torch']}, but the trainer needs {expected['torch_min']} or newer"
        )
    lacking = [arch for arch in _listed(expected, "archs") if arch not in facts["archs"]]
    lacking += [gpu for gpu in _listed(expected, "gpus") if not has_code(facts["archs"], gpu)]
    if lacking:
        raise SelfTestFailed(
            f"torch has no code for {', '.join(lacking)}, which the stack requires; it has code for "
            f"{', '.join(facts['archs'])}"
        )
    return facts


def _minor(version: str) -> tuple[int, ...]:
    """Converts 2.9.0a0+fb1 to (2, 9).

    NVIDIA's own builds carry the number of a release that is yet to come.
    """
    return tuple(int(part) for part in version.split(".")[:2])


def _listed(expected: dict[str, str], name: str) -> list[str]:
    return expected[name].split(",") if name in expected else []


def _libraries() -> dict[str, Any]:
    """Returns the libraries of a process that did the imports of a rank, started Horovod and made a model.

    It runs in a process of its own.
    """
    import horovod
    import horovod.torch as hvd
    import open_clip
    import torch

    from trainer.internals import architectures_in_torch
    from trainer.sysinfo.libraries import nccl_facts

    hvd.init()
    size, nccl = hvd.size(), nccl_facts()
    open_clip.create_model("ViT-S-32-alt")
    hvd.shutdown()
    flags = architectures_in_torch()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "cuda": torch.version.cuda,
        "nccl": nccl.get("nccl_mapped"),
        "nccl_library": nccl.get("nccl_library"),
        "archs": [f"{arch[:-1]}.{arch[-1]}" for arch in re.findall(r"sm_(\d+)", flags)],
        "horovod_version": horovod.__version__,
        "horovod_size": size,
        "open_clip": open_clip.__version__,
    }


def _step(
    launcher: Literal["clipship", "mpirun"], backend: Literal["torch", "horovod"], *, compiled: bool = False
) -> float:
    """Returns the loss of one step of the demo's model, trained by two ranks on synthetic samples."""
    with tempfile.TemporaryDirectory(prefix="selftest-") as name:
        folder = Path(name)
        (folder / "model.json").write_text(files("trainer.demo").joinpath("digits-clip.json").read_text())
        table: dict[str, Any] = {
            "name": launcher,
            "data": {"format": "synthetic", "synthetic_samples": 16, "workers": 0},
            "model": {"name": str(folder / "model.json"), "compile": compiled},
            "optim": {"global_batch_size": 16, "steps": 1, "warmup_steps": 0},
            "comm": {"backend": backend, "launcher": launcher},
            "logging": {"runs": str(folder), "every_steps": 1},
            "resources": {"cpus_per_gpu": 1},
        }
        job = job_from_table(table, "the self-test's job")
        with stdout_is_stderr():
            code = run(job, nproc=2, hosts=None)
        if code != 0:
            raise SelfTestFailed(
                f"two ranks under {launcher} ended with exit code {code}; see their logs above"
            )
        return float(json.loads((folder / launcher / RESULT_FILE).read_text())["loss"])


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SelfTestFailed(f"{name} is not on PATH")
    return path


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RANK_MINUTES * 60)
    except (FileNotFoundError, subprocess.TimeoutExpired) as problem:
        raise SelfTestFailed(f"{command[0]}: {problem}") from None
    if done.returncode != 0:
        raise SelfTestFailed(
            f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


if __name__ == "__main__":
    main()
