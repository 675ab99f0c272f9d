"""The first processes of an MPIJob's pods, on a root file system that is read-only.

sshd, mpirun and the ranks are real.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import tiny_job
from tests.support.kubernetes_jobs import kubernetes_job, objects_of
from tests.support.ssh_hosts import missing_program
from trainer.config.loader import dump_job
from trainer.launch.kubernetes.manifest import manifest

IMAGE = Path(__file__).parents[2] / "docker"
LACKING = next(
    (name for name in ("unshare", "setpriv", "mount") if shutil.which(name) is None), missing_program()
)

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        LACKING is not None or os.geteuid() != 0, reason=f"needs root and {LACKING or 'nothing else'}"
    ),
    pytest.mark.skipif(
        not Path(sys.executable).with_name("mpirun").exists(), reason="needs Open MPI 5 beside this Python"
    ),
]

LAUNCHER = """
import sys
from pathlib import Path
from trainer.launch.kubernetes.pod import launcher
launcher.HOSTFILE = Path("/mnt/hostfile")
sys.exit(launcher.main(["/mnt/job.toml", "--ssh-port", "2022"]))
"""

PODS = """
set -eu
mount --make-rprivate /
mount --bind "$1" /mnt
mount --bind /mnt/passwd /etc/passwd
mount --bind /mnt/ssh-client.conf /etc/ssh/ssh_config
for folder in /tmp /dev/shm; do mount -t tmpfs -o mode=1777 tmpfs $folder; done
mkdir -p /run/sshd
mount -o remount,ro,bind /
! touch /var/tmp/x 2>/dev/null
(
    until grep -q listening /mnt/worker.log; do sleep 0.1; done
    code=0
    $2 "$4" -P /mnt/launcher.py >/mnt/launcher.log 2>&1 || code=$?
    echo $code >/mnt/code
    kill -TERM 1
) &
exec $3 "$4" -P -m trainer.launch.kubernetes.pod.worker \
/usr/sbin/sshd -De -f /mnt/sshd.conf -p 2022 >/mnt/worker.log 2>&1
"""
"""Process 1 of a PID namespace is the worker; the launcher reaches it over ssh, as if it were in another pod.
"""


def test_ranks_train_where_only_volumes_can_be_written_and_few_rights_are_left(tmp_path: Path) -> None:
    _volume(tmp_path)
    words = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", PODS, "sh", str(tmp_path)]
    done = subprocess.run(
        [*words, _rights("Launcher"), _rights("Worker"), sys.executable], env=_environment(), timeout=240
    )
    said = "".join(path.read_text() for path in (tmp_path / "launcher.log", tmp_path / "worker.log"))
    assert (tmp_path / "code").read_text() == "0\n", said
    assert done.returncode == 0
    assert (tmp_path / "runs/tiny/result.json").exists()
    assert "Accepted publickey for root" in said
    assert "Read-only file system" not in said


def _volume(folder: Path) -> None:
    """Writes the folder that pods share.

    It holds the job's key and file, the operator's list of workers and the image's settings of ssh and sshd.
    """
    (folder / ".ssh").mkdir()
    key = folder / ".ssh" / "id_rsa"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(key)], check=True
    )
    job = tiny_job(
        logging={"runs": "/mnt/runs"},
        resources={"nodes": 1, "gpus_per_node": 2, "cpus_per_gpu": 1},
        kubernetes={"gpu_resource": "none", "mounts": {"/mnt": "host:/mnt"}, "retries": 0},
    )
    settings = (
        f"UsePAM no\nAuthorizedKeysFile /mnt/.ssh/id_rsa.pub\nHostKey /mnt/.ssh/id_rsa\nSetEnv PATH={_PATH}\n"
    )
    texts = {
        "job.toml": dump_job(job),
        "hostfile": "localhost slots=2\n",
        "launcher.py": LAUNCHER,
        "ssh-client.conf": (IMAGE / "ssh-client.conf").read_text(),
        "sshd.conf": settings + (IMAGE / "sshd-root.conf").read_text(),
        "passwd": "root:x:0:0:root:/mnt:/bin/sh\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n",
        "worker.log": "",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)


_PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"


def _environment() -> dict[str, str]:
    """The variables of the manifest that a pod cannot do without."""
    return {
        "PATH": f"{_PATH}:/usr/sbin:/sbin",
        "HOME": "/mnt",
        "CLIPSHIP_SSH_KEY": "/mnt/.ssh/id_rsa",
        "CLIPSHIP_SUPERVISORS": "localhost:29400",
        "CLIPSHIP_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29401",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        "PRTE_MCA_prte_default_hostfile": "/mnt/hostfile",
        "PRTE_MCA_prte_keep_fqdn_hostnames": "1",
        "PRTE_MCA_ras_base_launch_orted_on_hn": "1",  # by ssh, though the worker is on mpirun's own machine
    }


def _rights(role: str) -> str:
    """A command that leaves the capabilities of root's container and allows no more, as the manifest says."""
    *_, mpijob = objects_of(manifest(kubernetes_job(kubernetes={"run_as_user": 0})))
    (container,) = mpijob["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]["containers"]
    kept = ",".join(f"+{name.lower()}" for name in container["securityContext"]["capabilities"]["add"])
    return f"setpriv --no-new-privs --inh-caps=-all --bounding-set=-all,{kept}"
