"""The batch script: its whole text, what it does with hostile values, what it refuses.

tests/cluster has a real Slurm.
"""

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import strategies as st

from tests.support.command_line import clipship, render
from tests.support.linters import shellcheck
from tests.support.slurm_jobs import CASES, PYXIS, slurm_table
from trainer.safe_io.values import value_lines


def script_of(**sections: Any) -> str:
    """The script of a job, which is accepted."""
    said = render("slurm", slurm_table(**sections))
    assert said.code == 0, said.err
    return said.out


def refused(**sections: Any) -> str:
    """Why the job has no script."""
    code, script, why = render("slurm", slurm_table(**sections))
    assert (code, script) == (2, "")
    return why


@pytest.mark.parametrize("name", CASES)
def test_golden_script(name: str, golden: Callable[[str, str], None]) -> None:
    code, script, warned = render("slurm", slurm_table(**CASES[name]))
    golden(f"slurm/{name}.sbatch", script)
    assert (code, "Traceback" in warned) == (0, False)
    assert "$CLIPSHIP_TOKEN" not in script, "which would be on a command line"
    assert shellcheck(script) == ""
    own = script.partition("\nwrite_job()")[0]  # its variables are words that no job may set
    declared = re.findall(r"\blocal ([^;\n]+)", own)
    names = re.findall(r"(?:^|[\s;(])([a-z_]\w*)\+?=", "\n".join((own, *declared)))
    assert "stop" in names
    assert not [name for name in names if not re.fullmatch("[a-z]+", name)]


text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


def in_bash(program: str, folder: Path, sections: dict[str, Any] | None = None, **commands: str) -> str:
    """Returns what functions of a job's script print, with these commands in place of Slurm's.

    stderr is a file, as in a batch job.
    """
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    head = script_of(logging={"runs": str(folder)}, **(sections or {})).removesuffix("\nmain\n")
    variables = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "8",
    }
    (folder / "first-run" / "artefacts").mkdir(parents=True, exist_ok=True)
    with (folder / "slurm-7.out").open("ab+") as output:  # of earlier starts, too
        begin = output.tell()
        done = subprocess.run(
            ["bash"],
            input=f"{head}\n{program}\n".encode(),
            stdout=output,
            stderr=output,
            check=False,
            env=variables,
            timeout=60,
        )
        output.seek(begin)
        return f"{output.read().decode()}exit {done.returncode}"


def tell(folder: Path, **values: object) -> str:
    """Returns a command of the shell that tells the script this, as the ranks' supervisors do."""
    return f"printf %s {shlex.quote(value_lines(values))} >{folder}/first-run/artefacts/launcher.env"


QUEUE = """
[[ $1 != requeue ]] || exec echo requeue >>"${{0%/*}}/slurm-7.out"
[[ $* == *hostnames* ]] && exec printf 'n1\\nn2\\n'
echo "JobId=7 JobName=x StartTime=2026-01-01T12:00:00 EndTime=2026-01-01T13:00:00 \
PreemptEligibleTime=2026-01-01T12:00:00 PreemptTime={} x"
"""


def start(folder: Path, srun: str, *, preempted: str = "None", **sections: Any) -> list[str]:
    """Returns the lines that a whole start of the script prints, with these commands as the cluster."""
    none = {"squeue": "", "getent": "", "ip": ""}
    said = in_bash(
        "main", folder, {"slurm": PYXIS, **sections}, srun=srun, scontrol=QUEUE.format(preempted), **none
    )
    return said.splitlines()


@pytest.mark.parametrize(
    ("slurm", "expected"),
    [
        ({"time": "UNLIMITED"}, 'slurm.time: "UNLIMITED" is not a time limit for Slurm; write it as'),
        ({"time": "0"}, "means no limit"),
        ({"time": "3"}, "is not longer than signal_lead_s = 180"),
        ({"time": "3:10", "container": "pyxis"}, "plus the 30 s that the removal of a container may take"),
        ({"mem": "480 GB"}, "is not an amount of memory for Slurm; write a whole number and one of K, M, G"),
        ({"mem": "-1"}, "is not an amount of memory for Slurm"),
        ({"array": "1-10%2"}, "must come one after the other"),
        ({"partition": "a b"}, "must be one word"),
        ({"setup": ["a\nb"]}, "must be one line"),
        ({"modules": ["cuda; rm"]}, "not the name of a module"),
        ({"extra": {"nodes": "3"}}, "nodes follows from resources.nodes"),
        ({"extra": {"gres": "nvme:1"}}, "gres follows from slurm.gres: change that instead"),
        ({"gres": ["nvme 1"]}, '"nvme 1" is no generic resource: write "NAME[:TYPE][:COUNT]"'),
        ({"gres": ["gpu:h100:4,nvme:1"]}, "is no generic resource"),
        ({"gres": ["gpu:h100:4"], "gpus": "gres"}, "gres names the GPUs, so that gpus says the same"),
        ({"output": "logs/%j/x"}, "Slurm makes no folders, so that only the file name may have a %"),
        ({"output": "logs/%N-%j.out"}, "has %N: known are %j, %x, %u, %A, %a, and %% for a %"),
        ({"output": "logs/%x.out"}, "needs %j, the id of the job"),
        ({"output": "logs/"}, "is a folder: name a file in it"),
        ({"retries": 1, "requeue": False}, "queues a failed job again, and requeue = false forbids that"),
        ({"extra": {"--licenses": "x"}}, "is not a long option of sbatch"),
        ({"extra": {"wait": True}}, "wait cannot be set: sbatch would answer only when the job has ended"),
        ({"extra": {"tasks-per-node": "2"}}, "tasks-per-node follows from resources.gpus_per_node"),
        ({"extra": {"nod": "5"}}, "nod is short for nodes to sbatch, and that follows from resources.nodes"),
        ({"srun": {"versio": True}}, "versio is short for version to srun, and that cannot be set"),
        ({"extra": {"comment": "a\n#SBATCH --nodes=9"}}, "must be one line"),
        ({"srun": {"nodes": "3"}}, "nodes follows from resources.nodes"),
        ({"srun": {"gpus": "2"}}, "gpus follows from [resources]: change that instead"),
        ({"srun": {"mem": "9G"}}, "mem follows from slurm.mem: change that instead"),
        ({"srun": {"pty": True}}, "pty cannot be set: ranks have no terminal"),
        ({"srun": {"exact": True}, "launcher": "mpirun"}, 'launcher = "mpirun" starts the ranks without it'),
        ({"container_binary": "singularity"}, 'container_binary is for container = "apptainer"'),
        ({"container": "pyxis", "container_flags": ["-c"]}, "options of pyxis belong to slurm.srun"),
        ({"container": "apptainer", "container_flags": ["fakeroot"]}, "is not an option of apptainer"),
        ({"container": "apptainer", "container_flags": ["--bind=/a:/b"]}, "folders are slurm.mounts"),
        ({"signal": "USR1"}, 'must be one of "USR2", "HUP", "INT" (given "USR1")'),
        ({"signal_lead_s": 5}, "must be at least 10"),
        ({"container": "docker"}, 'must be one of "none", "pyxis", "apptainer"'),
        ({"container": "pyxis", "launcher": "mpirun"}, "cannot start pyxis containers"),
        ({"mounts": ["/a:/a"]}, "mounts are for containers"),
        ({"container": "pyxis", "mounts": ["data"]}, "is not a mount"),
        ({"container": "pyxis", "mounts": ["/a:/"]}, "would hide all of the image"),
        ({"container": "pyxis", "mounts": ["/a,/b:/c"]}, "is not a mount"),
        ({"interface": "ib0"}, 'interface needs rendezvous = "ipv4"'),
        ({"rendezvous": "ipv4", "interface": "ib0; id"}, "must consist of letters"),
        ({"rendezvous": "ipv4", "name_suffix": "i"}, 'name_suffix needs rendezvous = "name"'),
        ({"max_restarts": -1}, "must be at least 0"),
    ],
)
def test_what_slurm_would_misunderstand_is_refused(slurm: dict[str, Any], expected: str) -> None:
    assert expected in refused(slurm=slurm)


GLOO = {"backend": "horovod", "horovod": {"cpu_operations": "gloo"}}
PIPED = {"train": ["-"], "stream_samples": 64}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": PIPED}, "a batch job has no standard input"),
        ({"stage": [{"data": PIPED}]}, "data.train = - of stage 2: a batch job has no standard input"),
        (
            {"stage": [{"optim": {"global_batch_size": 7}}]},
            "stage 2: optim.global_batch_size = 7 cannot be shared equally by 8 ranks",
        ),
        ({"slurm": {"container": "pyxis"}}, "needs an image: give slurm.image or image.tag"),
        (
            {"slurm": {"gres": ["gpu:a100:2", "gpu:h100:1"]}},
            "slurm.gres asks for 3 GPUs of each node, and resources.gpus_per_node is 4: set it to 3",
        ),
        (
            {"slurm": {"retries": 3, "max_restarts": 2}},
            "slurm.retries = 3 starts a failed job more often than slurm.max_restarts = 2 allows",
        ),
        ({"resources": {"nodes": 3}}, "cannot be shared equally by 12 ranks"),
        (
            {"comm": GLOO, "slurm": {"launcher": "mpirun"}},
            'cpu_operations = gloo needs slurm.launcher = "srun"',
        ),
        ({"slurm": PYXIS, "logging": {"runs": "/scratch/a,b"}}, "/scratch/a,b: a folder with a comma"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_it_waits_in_a_queue(sections: dict[str, Any], said: str) -> None:
    assert said in refused(**sections)


@pytest.mark.parametrize("name", ["stop", "job", "ranks", "IFS", "UID", "BASHOPTS"])
def test_a_variable_that_is_the_scripts_or_bashs_own_is_refused(name: str) -> None:
    assert f"{name}: [env] cannot set this on Slurm" in refused(
        env={name: "x", "http_proxy": "x", "MINE": "x"}
    )
    script = script_of(env={name: "x"}, slurm={**PYXIS, "container": "apptainer"})
    assert f"APPTAINERENV_{name}=x" in script


def test_a_line_break_in_a_folder_makes_no_line_of_the_script(tmp_path: Path) -> None:
    path = tmp_path / "a\n#SBATCH --comment=x" / "job.toml"
    path.parent.mkdir()
    path.write_text(tomli_w.dumps(slurm_table(slurm={"output": "x-%j.out"})))
    code, script, why = clipship("render", "slurm", path)
    assert (code, script) == (2, "")
    assert re.search(r"slurm.output: '.*a\\\\?n#SBATCH .*' has a character that is not prin", why)


@pytest.mark.parametrize(
    ("train", "folders"),
    [
        ("/{scratch,data}/cc3m/{00..03}.tar", ["/data/cc3m", "/scratch/cc3m"]),
        ("/data/{0000..9999}/{00..03}.tar", ["/data"]),
        ("/data/*/x.tar", ["/data"]),
        ("/data/a\\}b/{00..03}.tar", ["/data/a}b"]),
        ("/data/[[]1]/x.tar", ["/data/[1]"]),
        ("/data/a{b/x.tar", ["/data/a{b"]),
        *((train, []) for train in ("/{00..03}.tar", "/opt/{00..03}.tar", "//opt/x.tar", "/usr/../x.tar")),
    ],
)
def test_the_folders_that_a_pattern_names_are_mounted_if_they_do_not_hide_the_image(
    train: str, folders: list[str]
) -> None:
    data = {"train": [train]}
    if not folders:
        assert "where it would hide the image's /opt/clipship" in refused(slurm=PYXIS, data=data)
        assert script_of(data=data)
        return
    (line,) = [
        line for line in script_of(slurm=PYXIS, data=data).splitlines() if "--container-mounts=" in line
    ]
    mounts = shlex.split(line.replace("\\", ""))[0].partition("=")[2].split(",")
    expected = [*folders, "/dev/shm", "/scratch/runs"]
    assert sorted(mounts) == sorted(f"{folder}:{folder}" for folder in expected)
