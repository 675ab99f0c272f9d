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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.command_line import clipship, render
from tests.support.linters import shellcheck
from tests.support.slurm_jobs import CASES, PYXIS, SPARE, slurm_table
from trainer.config.loader import load_job
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


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=text, word=text)
def test_any_variable_and_the_job_itself_leave_bash_as_they_went_in(
    value: str, word: str, tmp_path: Path
) -> None:
    hostile = f"\n{word}\nEND_OF_JOB\n"
    sections = {"env": {"A": value, "B": hostile}, "logging": {"runs": str(tmp_path)}}
    found = in_bash("environment\nwrite_job\nenv -0", tmp_path, sections)
    variables = dict(entry.split("=", 1) for entry in found.split("\0") if "=" in entry)
    assert (variables["A"], variables["B"], variables["CLIPSHIP_LAUNCHER_JOB"]) == (value, hostile, "7")
    (tmp_path / "given.toml").write_text(tomli_w.dumps(slurm_table(**sections)))
    written = tmp_path / "first-run" / "artefacts" / "slurm-job.toml"
    assert load_job(written) == load_job(tmp_path / "given.toml")


def in_bash(program: str, folder: Path, sections: dict[str, Any] | None = None, **commands: str) -> str:
    """Returns what functions of a job's script print, with these commands in place of Slurm's.

    stderr is a file, as in a batch job.
    """
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    head = script_of(**{"logging": {"runs": str(folder)}, **(sections or {})}).removesuffix("\nmain\n")
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


@pytest.mark.parametrize(("nodes", "excluded"), [("n1 n2 n3 n3", False), ("n1 n2 n3 n4", True), ("", True)])
def test_a_bad_node_is_not_excluded_where_the_job_would_then_wait_for_ever(
    tmp_path: Path, nodes: str, excluded: bool
) -> None:
    """The job takes two nodes and a spare one; sinfo names a node once for each of its features."""
    scontrol = """case $* in
    *hostnames\\ n2) echo n2 ;;
    *hostnames*) echo n1; echo n2 ;;
    *update*) echo "asked for $*" ;;
    *) echo 'JobId=7 ExcNodeList=(null) NodeList=n1 ' ;;
    esac"""
    sinfo = f"printf '%s\\n' {nodes}" if nodes else "exit 1"
    sections = {"recovery": SPARE, "resources": {"nodes": 2, "gpus_per_node": 1}}
    program = f"{tell(tmp_path, left_out=['n2'])}; SLURM_JOB_PARTITION=main code=75; exclude_bad_nodes"
    said = in_bash(program, tmp_path, sections, scontrol=scontrol, sinfo=sinfo)
    assert ("asked for update JobId=7 ExcNodeList=n2" in said) is excluded, said
    assert ("may have node n2 again: without it the partition has fewer than 3 nodes" in said) is not excluded


QUEUE = """
[[ $1 != requeue ]] || exec echo requeue >>"${0%/*}/slurm-7.out"
[[ $* == *hostnames* ]] && exec printf 'n1\\nn2\\n'
echo "JobId=7 StartTime=2026-01-01T12:00:00 EndTime=2026-01-01T13:00:00 PreemptTime=None x"
"""


def start(folder: Path, srun: str, **sections: Any) -> list[str]:
    """Returns the lines that a whole start of the script prints, with these commands as the cluster."""
    commands = {"srun": srun, "scontrol": QUEUE, "squeue": "", "getent": "", "ip": ""}
    return in_bash("main", folder, {"slurm": PYXIS, **sections}, **commands).splitlines()


@pytest.mark.parametrize("code", ["PIPESTATUS[$(touch broken >&2)]", "", "08", "75 76"])
def test_an_exit_code_that_is_none_fails_the_run_and_is_not_evaluated(tmp_path: Path, code: str) -> None:
    value = code.replace("broken", str(tmp_path / "broken"))
    (tmp_path / "told").write_text(value_lines({"word": "end", "exit_code": value, "saved": True}))
    srun = f"cp '{tmp_path}/told' '{tmp_path}/first-run/artefacts/launcher.env'"
    assert start(tmp_path, srun)[-1] == "exit 1"
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ("n2: tasks 4-7: Exited with exit code 1", "the next start does without node n2"),
        ("Task launch for StepId=7.0 failed on node n2: no", "the next start does without node n2"),
        ("the controller does not answer", "nothing says which node failed: "),
    ],
)
def test_a_start_whose_ranks_could_record_nothing_is_tried_again_without_the_node_that_srun_names(
    tmp_path: Path, told: str, says: str
) -> None:
    of_a_rank = "4: srun: error: n1: task 0: Exited with exit code 1"
    srun = (
        f"[[ $* != *trainer.rank* ]] || {{ printf '%s\\n' '{of_a_rank}' 'srun: error: {told}' >&2; exit 1; }}"
    )
    said = start(tmp_path, srun, slurm={"retries": 2})
    assert "requeue" in said, said
    assert [line for line in said if line.startswith(f"clipship: {says}")], said


@pytest.mark.parametrize(
    ("slurm", "expected"),
    [
        ({"time": "UNLIMITED"}, 'slurm.time: "UNLIMITED" is not a time limit for Slurm; write it as'),
        ({"time": "0"}, "means no limit"),
        ({"time": "3"}, "is not longer than signal_lead_s = 180"),
        ({"time": "3:10", "container": "pyxis"}, "plus the 30 s that the removal of a container may take"),
        ({"mem": "480 GB"}, "is not an amount of memory for Slurm; write a whole number and one of K, M, G"),
        ({"array": "1-10%2"}, "must come one after the other"),
        ({"partition": "a b"}, "must be one word"),
        ({"modules": ["cuda; rm"]}, "not the name of a module"),
        ({"extra": {"gres": "nvme:1"}}, "gres follows from slurm.gres: change that instead"),
        ({"gres": ["nvme 1"]}, '"nvme 1" is no generic resource: write "NAME[:TYPE][:COUNT]"'),
        ({"gres": ["gpu:h100:4"], "gpus": "gres"}, "gres names the GPUs, so that gpus says the same"),
        ({"output": "logs/%j/x"}, "Slurm makes no folders, so that only the file name may have a %"),
        ({"output": "logs/%N-%j.out"}, "has %N: known are %j, %x, %u, %A, %a, and %% for a %"),
        ({"output": "logs/%x.out"}, "needs %j, the id of the job"),
        ({"retries": 1, "requeue": False}, "queues a failed job again, and requeue = false forbids that"),
        ({"extra": {"--licenses": "x"}}, "is not a long option of sbatch"),
        ({"extra": {"wait": True}}, "wait cannot be set: sbatch would answer only when the job has ended"),
        ({"extra": {"nod": "5"}}, "nod is short for nodes to sbatch, and that follows from resources.nodes"),
        ({"extra": {"comment": "a\n#SBATCH --nodes=9"}}, "must be one line"),
        ({"srun": {"mem": "9G"}}, "mem follows from slurm.mem: change that instead"),
        ({"srun": {"pty": True}}, "pty cannot be set: ranks have no terminal"),
        ({"srun": {"exact": True}, "launcher": "mpirun"}, 'launcher = "mpirun" starts the ranks without it'),
        ({"container_binary": "singularity"}, 'container_binary is for container = "apptainer"'),
        ({"container": "pyxis", "container_flags": ["-c"]}, "options of pyxis belong to slurm.srun"),
        ({"container": "apptainer", "container_flags": ["fakeroot"]}, "is not an option of apptainer"),
        ({"container": "apptainer", "container_flags": ["--bind=/a:/b"]}, "folders are slurm.mounts"),
        ({"container": "pyxis", "launcher": "mpirun"}, "cannot start pyxis containers"),
        ({"container": "pyxis", "mounts": ["data"]}, "is not a mount"),
        ({"container": "pyxis", "mounts": ["/a:/"]}, "would hide all of the image"),
        ({"container": "pyxis", "mounts": ["/a,/b:/c"]}, "is not a mount"),
        ({"interface": "ib0"}, 'interface needs rendezvous = "ipv4"'),
        ({"rendezvous": "ipv4", "interface": "ib0; id"}, "must consist of letters"),
        ({"rendezvous": "ipv4", "name_suffix": "i"}, 'name_suffix needs rendezvous = "name"'),
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
        ({"stage": [{"optim": {"global_batch_size": 7}}]}, "stage 2: optim.global_batch_size = 7 cannot be"),
        ({"slurm": {"container": "pyxis"}}, "needs an image: give slurm.image or image.tag"),
        (
            {"slurm": {"gres": ["gpu:a100:2", "gpu:h100:1"]}},
            "slurm.gres asks for 3 GPUs of each node, and resources.gpus_per_node is 4: set it to 3",
        ),
        ({"slurm": {"retries": 3, "max_restarts": 2}}, "more often than slurm.max_restarts = 2 allows"),
        ({"comm": GLOO, "slurm": {"launcher": "mpirun"}}, 'gloo needs slurm.launcher = "srun"'),
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


def test_every_variable_of_a_rank_is_named_to_pyxis() -> None:
    script = script_of(slurm=PYXIS, env={"MINE": "x"}, comm={"nccl": {"socket_ifname": "ib0"}})
    [named] = re.findall(r"--container-env=(\S+)", script)
    exports = [line for line in script.splitlines() if line.startswith("    export ")]
    words = {word for line in exports for word in shlex.split(line, comments=True) if "=" in word}
    exported = {word.partition("=")[0] for word in words} - {"ENROOT_FORCE_OVERRIDE"}  # enroot's own
    assert {"MINE", "NCCL_SOCKET_IFNAME", "CLIPSHIP_WORLD_SIZE"} <= exported
    # What supervisors read of a rendezvous, and the address of torch's.
    addresses = {"CLIPSHIP_TOKEN", "CLIPSHIP_SUPERVISORS", "MASTER_ADDR", "MASTER_PORT"}
    assert set(named.split(",")) == exported | addresses
