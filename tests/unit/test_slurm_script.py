"""The batch script: its whole text, what it does with hostile values, what it refuses.

tests/cluster has a real Slurm.
"""

import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.command_line import clipship, render
from tests.support.linters import shellcheck
from tests.support.slurm_jobs import CASES, HOROVOD, PYXIS, SPARE, slurm_table
from trainer.config.loader import load_job
from trainer.safe_io.values import read_values, value_lines


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


def test_scripts_are_as_long_as_their_pages_say(tmp_path: Path) -> None:
    assert len(script_of(resources={"nodes": 1}).splitlines()) <= 150
    assert clipship("init", "--preset", "slurm", tmp_path / "job.toml").code == 0
    assert 200 < len(clipship("render", "slurm", tmp_path / "job.toml").out.splitlines()) <= 230


@pytest.mark.parametrize("env", [{}, {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}])
def test_a_script_that_slurm_does_not_run_says_how_to_start_it(tmp_path: Path, env: dict[str, str]) -> None:
    """The second are the variables of an interactive allocation."""
    script = tmp_path / "s.sh"
    script.write_text(script_of(logging={"runs": str(tmp_path)}))
    ended = subprocess.run(
        ["bash", script], capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"], **env}
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        f"clipship: this is a batch script of Slurm: submit it with `sbatch {script}`, or the job file with "
        "`clipship submit`\n"
    )


text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=text, word=text)
def test_any_variable_and_the_job_itself_leave_bash_as_they_went_in(
    value: str, word: str, tmp_path: Path
) -> None:
    sections = {"env": {"A": value, "B": "\n" + word + "\nEND_OF_JOB\n"}, "logging": {"runs": str(tmp_path)}}
    head = script_of(**sections).removesuffix("\nmain\n")
    (tmp_path / "given.toml").write_text(tomli_w.dumps(slurm_table(**sections)))
    (tmp_path / "first-run" / "artefacts").mkdir(parents=True, exist_ok=True)
    program = f"{head}\nenvironment\nwrite_job\nenv -0\n"
    env = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    found = subprocess.run(["bash"], input=program.encode(), capture_output=True, check=True, env=env).stdout
    variables = dict(entry.split("=", 1) for entry in found.decode().split("\0") if "=" in entry)
    assert variables["A"] == value
    assert variables["CLIPSHIP_LAUNCHER_JOB"] == "7"
    assert variables["B"] == "\n" + word + "\nEND_OF_JOB\n"
    assert load_job(tmp_path / "first-run" / "artefacts" / "slurm-job.toml") == load_job(
        tmp_path / "given.toml"
    )


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


@pytest.mark.parametrize(
    ("recorded", "asked"), [("n2", "n2"), ("n2.cluster.example", "n2"), ("login", "login")]
)
def test_a_node_is_asked_for_by_the_name_that_slurm_has_for_it(
    tmp_path: Path, recorded: str, asked: str
) -> None:
    said = in_bash(f"answers {recorded}", tmp_path, scontrol="echo n1; echo n2", srun='echo "$*"')
    assert f"--nodelist={asked} " in said


@pytest.mark.parametrize(
    ("srun", "said"),
    [
        ("exit 3", "must be on a file system that all nodes share: change logging.runs\nexit 2"),
        (
            "echo 'srun: error: CPU binding outside of job step allocation' >&2; exit 1",
            "ended with 1: the messages above say why\nexit 1",
        ),
        ("exit 0", "exit 0"),
    ],
)
def test_a_step_that_cannot_start_is_not_blamed_on_the_run_folder(
    tmp_path: Path, srun: str, said: str
) -> None:
    found = in_bash("start=1 stop=''; see_run_folder", tmp_path, {"slurm": PYXIS}, srun=srun)
    assert found.endswith(said)


@pytest.mark.parametrize(
    ("extra", "left"), [({}, []), ({"mem-bind": "verbose,local"}, ["SLURM_MEM_BIND=verbose,local"])], ids=str
)
def test_bindings_of_the_session_that_submitted_do_not_reach_the_ranks_and_the_jobs_own_do(
    tmp_path: Path, extra: dict[str, str], left: list[str]
) -> None:
    exported = (
        "SLURM_CPU_BIND=quiet,mask_cpu:0x1 SLURM_CPU_BIND_LIST=0x1 SLURM_MEM_BIND=none SLURM_MEM_BIND_TYPE=x"
    )
    said = in_bash(f"export {exported}; environment; env", tmp_path, {"slurm": {"extra": extra}})
    assert [line for line in said.splitlines() if "_BIND" in line] == left


def test_one_part_of_a_heterogeneous_job_does_not_train_alone(tmp_path: Path) -> None:
    said = in_bash("SLURM_HET_SIZE=2; main", tmp_path)
    assert "Slurm gives it 8 in one of 2 parts of a heterogeneous job (does sbatch's command line" in said
    assert said.endswith("exit 2")


def tell(folder: Path, **values: object) -> str:
    """Returns a command of the shell that tells the script this, as the ranks' supervisors do."""
    return f"printf %s {shlex.quote(value_lines(values))} >{folder}/first-run/artefacts/launcher.env"


@pytest.mark.parametrize(
    ("before", "left_out", "asked"),
    [
        ("ExcNodeList=(null)", ["n2.cluster"], "ExcNodeList=n2"),
        ("ExcNodeList=n7,n[8-9]", ["n1", "n2"], "ExcNodeList=n7,n[8-9],n1,n2"),
        ("ExcNodeList=n7", [], None),
        ("ExcNodeList=(null)", [], None),
    ],
)
def test_the_next_start_does_without_nodes_that_the_run_has_left_out(
    tmp_path: Path, before: str, left_out: list[str], asked: str | None
) -> None:
    told = tell(tmp_path, rank=0, left_out=left_out, start="")
    scontrol = f"""case $* in
    *hostnames*) echo n1; echo n2 ;;
    *update*) echo "asked for $*" ;;
    *) echo 'JobId=7 ReqNodeList=(null) {before} NodeList=n1 ' ;;
    esac"""
    said = in_bash(f"{told}; code=75; exclude_bad_nodes", tmp_path, {"recovery": SPARE}, scontrol=scontrol)
    lines = [line for line in said.splitlines() if line.startswith("asked")]
    assert lines == ([] if asked is None else [f"asked for update JobId=7 {asked}"])


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


OVER_MPI: dict[str, Any] = {
    "comm": HOROVOD | {"launcher": "mpirun"},
    "recovery": {"max_restarts": 3},
    "slurm": {},
}
MPI_RANKS = """
[[ $* == *trainer.rank* ]] || {{ [[ ! -e {run}/lost ]]; exit; }}
echo "generation $CLIPSHIP_GENERATION" >&2
cd {run}
{deed}"""
STARTED = re.compile(r"^generation (\d)$", re.MULTILINE)


def over_mpi(folder: Path, deed: str, preempted: str = "None") -> tuple[list[int], list[str]]:
    """Generations of ranks that mpirun starts and that do this, and the lines of the script.

    An earlier start has asked for another one.
    """
    run = folder / "first-run"
    (run / "artefacts").mkdir(parents=True)
    (run / "artefacts" / "launcher.env").write_text("word=again\ngeneration=2\n")
    said = start(folder, MPI_RANKS.format(run=run, deed=deed), preempted=preempted, **OVER_MPI)
    return list(map(int, STARTED.findall("\n".join(said)))), said


def test_over_mpi_the_script_starts_all_again_while_the_run_asks_for_it(tmp_path: Path) -> None:
    generations, said = over_mpi(
        tmp_path,
        """if ((CLIPSHIP_GENERATION < 3)); then
            printf '%s\n' word=again "generation=$((CLIPSHIP_GENERATION * 2))" >artefacts/launcher.env
            exit 76
        fi
        printf '%s\n' word=end node=n1 exit_code=0 'reason=the end' >artefacts/launcher.env
        exit 5""",
    )
    assert generations == [1, 2, 4], "3 began without the script"
    assert said[-1] == "exit 0", said


def test_over_mpi_ranks_that_slurm_killed_at_once_start_again(tmp_path: Path) -> None:
    """No supervisor could ask; the run has left a request for that case, of its present generation only."""
    began = int(time.time())
    request = tell(tmp_path, word="again-if-killed", generation=2)
    generations, said = over_mpi(tmp_path, f"((CLIPSHIP_GENERATION == 1)) || exit 137\n{request}\nexit 137")
    assert generations == [1, 2]
    assert "clipship: the ranks were killed before a supervisor could say why" in said
    asked = read_values(tmp_path / "first-run" / "artefacts" / "launcher.env")
    assert asked["word"] == "again"
    assert int(asked["time"]) >= began, "the time of the end, not that of the request"
    assert said[-1] == "exit 137", said


@pytest.mark.parametrize(
    ("deed", "preempted"),
    [
        ("exit 137", "2026-01-01T12:00:30"),
        ("kill -USR2 $PPID; exit 137", "None"),
        ("printf '%s\\n' word=end exit_code=1 >artefacts/launcher.env; exit 137", "None"),
        ("exit 0", "None"),
        ("exit 75", "None"),
        ("rm artefacts/launcher.env; exit 9", "None"),
    ],
    ids=["preempted", "stopped", "ended", "done", "saved", "asks for nothing"],
)
def test_over_mpi_ranks_that_end_in_another_way_are_not_started_again(
    tmp_path: Path, deed: str, preempted: str
) -> None:
    request = tell(tmp_path, word="again-if-killed", generation=2)
    generations, said = over_mpi(tmp_path, f"{request}\n{deed}", preempted)
    assert generations == [1], said


def test_over_mpi_a_lost_node_queues_the_job_again(tmp_path: Path) -> None:
    request = tell(tmp_path, word="again", generation=2)
    said = over_mpi(tmp_path, f"{request}; touch lost; exit 76")[1]
    assert said[-3:] == ["clipship: a node is lost; queued again", "requeue", "exit 1"], said


def test_what_waits_to_kill_the_ranks_ends_with_the_script(tmp_path: Path) -> None:
    """Later their process id may be that of another program."""
    program = "sleep 30 & watcher=$! stop='' ranks=1 code=0; (end); wait $watcher"
    assert in_bash(program, tmp_path, {"recovery": SPARE}, scontrol="") == "exit 143"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("Job is pending execution for job 7", ["exit 5"]),
        (
            "Access denied",
            ["clipship: Slurm did not queue the job again: submit it to resume (Access denied)", "exit 1"],
        ),
    ],
)
def test_a_job_that_slurm_has_queued_again_itself_need_not_be_submitted(
    tmp_path: Path, answer: str, said: list[str]
) -> None:
    scontrol = f"[[ $1 != requeue ]] || {{ echo '{answer}' >&2; exit 1; }}"
    lines = in_bash(
        "start=1 code=1; again 'a node is lost'; exit 5", tmp_path, scontrol=scontrol
    ).splitlines()
    assert lines == ["clipship: a node is lost; queued again", *said]


UNPACKING = """
[[ $* == *trainer.rank* ]] || exit 0
trap 'echo "srun: error: n1: task 0: Exited with exit code 1" >&2; exit 1' USR2 TERM
echo 'pyxis: importing docker image' >&2
for ((try = 0; try < 300; try++)); do {signal}; sleep 0.1; done
"""
"""A step that has no rank yet, as srun with pyxis ends it when a signal comes."""
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


QUEUED_AGAIN = ["clipship: stopped before the start; queued again", "requeue", "exit 75"]


@pytest.mark.parametrize(
    ("srun", "preempted", "end"),
    [
        (UNPACKING.format(signal="kill -USR2 $PPID"), "None", QUEUED_AGAIN),
        (UNPACKING.format(signal="exit 1"), "2026-01-01T12:00:30", QUEUED_AGAIN),
        (
            UNPACKING.format(signal="kill -TERM $PPID; kill -TERM $$"),
            "None",
            ["clipship: stopped before the start", "exit 75"],
        ),
        # A time limit before the ranks start.
        (
            """[[ $* == *trainer.rank* ]] && echo STARTED
            [[ $* != *"run folder"* ]] || { kill -USR2 $PPID; exit 1; }""",
            "None",
            QUEUED_AGAIN,
        ),
        (UNPACKING.format(signal="exit 1"), "None", ["exit 1"]),
    ],
    ids=["USR2", "preempted", "cancelled", "limit", "no image"],
)
def test_a_start_that_ends_before_its_ranks_is_queued_again_if_it_was_stopped(
    tmp_path: Path, srun: str, preempted: str, end: list[str]
) -> None:
    said = start(tmp_path, srun, preempted=preempted)
    assert said[-len(end) :] == end, said
    assert ("requeue" in said) is ("requeue" in end)
    assert "STARTED" not in said
    if end == ["exit 1"]:
        assert said[-2].endswith("see the launcher's messages above; its exit code is 1")


@pytest.mark.parametrize("code", ["PIPESTATUS[$(touch broken >&2)]", "", "-1", "08", "75 76", "1000"])
def test_an_exit_code_that_is_none_fails_the_run_and_is_not_evaluated(tmp_path: Path, code: str) -> None:
    value = code.replace("broken", str(tmp_path / "broken"))
    (tmp_path / "told").write_text(value_lines({"word": "end", "exit_code": value, "saved": True}))
    srun = f"cp '{tmp_path}/told' '{tmp_path}/first-run/artefacts/launcher.env'"
    assert start(tmp_path, srun)[-1] == "exit 1"
    assert not (tmp_path / "broken").exists()


def failing(folder: Path, code: int) -> str:
    """srun whose rank 1 ends the run with this exit code."""
    return f"{tell(folder, word='end', rank=1, node='n2', exit_code=code, reason='why')}; exit {code}"


def test_a_failure_is_tried_again_without_its_node_as_often_as_the_job_allows(tmp_path: Path) -> None:
    srun = failing(tmp_path, 1)
    for failure in (1, 2):
        said = start(tmp_path, srun, slurm={"retries": 2})
        assert f"clipship: failure {failure} of 2 that slurm.retries allows; queued again" in said, said
        assert "requeue" in said
        assert "clipship: the next start does without node n2" in said
    assert start(tmp_path, srun, slurm={"retries": 2})[-2:] == [
        "clipship: rank 1 on n2 ended the run with exit code 1: why",
        "exit 1",
    ]


@pytest.mark.parametrize(
    ("told", "node"),
    [
        ("n2: task 5: Exited with exit code 1", "n2"),
        ("n2: tasks 4-7: Exited with exit code 1", "n2"),
        ("Task launch for StepId=7.0 failed on node n2: Communication connection failure", "n2"),
        ("the controller does not answer", None),
    ],
)
def test_a_start_whose_ranks_could_record_nothing_is_tried_again_without_the_node_that_srun_names(
    tmp_path: Path, told: str, node: str | None
) -> None:
    srun = (
        f"[[ $* != *trainer.rank* ]] || {{ echo '4: srun: error: n1: task 0: of a rank' >&2\n"
        f"echo 'srun: error: {told}' >&2\necho 'srun: error: n1: tasks 0-3: Terminated' >&2\nexit 1; }}"
        if node
        else f"[[ $* != *trainer.rank* ]] || {{ echo 'srun: error: {told}' >&2; exit 1; }}"
    )
    said = start(tmp_path, srun, slurm={"retries": 2})
    assert "requeue" in said, said
    wanted = f"the next start does without node {node}" if node else "nothing says which node failed: "
    assert [line for line in said if line.startswith(f"clipship: {wanted}")], said
    assert not [line for line in said if "without node n1" in line], said


def test_nodes_that_a_job_asks_for_by_name_and_leaves_out_after_a_failure_are_told() -> None:
    for retries, told in ((0, False), (2, True)):
        said = render("slurm", slurm_table(slurm={"nodelist": "n1,n2", "retries": retries}))
        assert ("may wait for ever" in said.err) is told


def test_bad_input_is_not_tried_again(tmp_path: Path) -> None:
    said = start(tmp_path, failing(tmp_path, 2), slurm={"retries": 2})
    assert (said[-1], "requeue" in said) == ("exit 2", False)


NO_PMIX = (
    "[[ $* != *trainer.rank* ]] || "
    "{ echo 'srun: error:  mpi/pmix_v4: init: can not load PMIx library' >&2; exit 1; }"
)


WITHOUT_PMIX = (
    'comm.launcher = "clipship", for Gloo in place of MPI; or slurm.mpi = "pmi2", for an Open MPI 4 with PMI2'
)


@pytest.mark.parametrize(
    ("slurm", "keys"),
    [
        ({}, f'slurm.launcher = "mpirun"; or {WITHOUT_PMIX}'),
        (PYXIS, WITHOUT_PMIX),
    ],
)
def test_a_cluster_that_lacks_pmix_is_told_which_package_brings_it(
    tmp_path: Path, slurm: dict[str, Any], keys: str
) -> None:
    said = start(tmp_path, NO_PMIX, slurm=slurm, comm=HOROVOD)
    assert "install libpmix-dev" in said[-2]
    assert said[-2].endswith(f"To start without it, set {keys}")
    later = start(
        tmp_path, UNPACKING.format(signal="exit 1"), slurm=slurm, comm=HOROVOD
    )  # its output follows the first one's
    assert later[-2].endswith("its exit code is 1")


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


@pytest.mark.parametrize(
    ("name", "pyxis", "apptainer"),
    [
        ("clip:1", "clip:1", "docker://clip:1"),
        ("vision/clip:1", "vision/clip:1", "docker://vision/clip:1"),
        (
            "r.example.com/vision/clip:1",
            "r.example.com#vision/clip:1",
            "docker://r.example.com/vision/clip:1",
        ),
        ("localhost:5000/clip", "localhost:5000#clip", "docker://localhost:5000/clip"),
        ("/images/my clip.sqsh", "/images/my clip.sqsh", "/images/my clip.sqsh"),
        ("docker://clip:1", "docker://clip:1", "docker://clip:1"),
    ],
)
def test_images_are_named_as_the_containers_tool_wants(name: str, pyxis: str, apptainer: str) -> None:
    for container, line in (
        ("pyxis", f"--container-image={shlex.quote(pyxis)}"),
        ("apptainer", f" {shlex.quote(apptainer)}"),
    ):
        assert f"{line} \\\n" in script_of(slurm={"container": container, "image": name})


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


def test_every_variable_of_a_rank_is_named_to_pyxis() -> None:
    script = script_of(slurm=PYXIS, env={"MINE": "x"}, comm={"nccl": {"socket_ifname": "ib0"}})
    line = next(line for line in script.splitlines() if "--container-env=" in line)
    named = set(line.removesuffix(" \\").partition("=")[2].split(","))
    exported = {
        word.partition("=")[0]
        for line in script.splitlines()
        if line.startswith("    export ")
        for word in shlex.split(line, comments=True)
        if "=" in word
    }
    exported -= {"ENROOT_FORCE_OVERRIDE"}  # enroot's own
    # What supervisors read of a rendezvous, and the address of torch's.
    addresses = {"CLIPSHIP_TOKEN", "CLIPSHIP_SUPERVISORS", "MASTER_ADDR", "MASTER_PORT"}
    assert exported | addresses == named
    assert {"MINE", "NCCL_SOCKET_IFNAME", "CLIPSHIP_WORLD_SIZE"} <= named
