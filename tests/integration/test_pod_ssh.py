"""Real sshd with the image's own settings.

The tests show who is let in, whom the launcher believes and what cannot be reached through it.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.ssh_hosts import listening, missing_program
from trainer.launch.kubernetes.pod.launcher import ssh_variables
from trainer.launch.kubernetes.pod.names import known_host
from trainer.sysinfo.addresses import free_port

IMAGE = Path(__file__).parents[2] / "docker"
ADDRESS = "127.0.0.1"

pytestmark = pytest.mark.skipif(missing_program() is not None, reason=f"needs {missing_program()}")


@dataclass(frozen=True)
class Worker:
    """An sshd as a worker pod runs it, with the job's key in a folder of its own."""

    port: int
    key: Path

    def ssh(self, options: str, *words: str) -> "subprocess.CompletedProcess[str]":
        """Calls it as mpirun does, with these options and the job's key."""
        command = ["ssh", "-i", str(self.key), "-o", "IdentitiesOnly=yes", *options.split(), *words, ADDRESS]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture(params=["sshd-user.conf", "sshd-root.conf"])
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Worker]:
    key = _make_key(tmp_path / "id_rsa")
    with _sshd(IMAGE / request.param, key, tmp_path) as port:
        yield Worker(port, key)


@contextmanager
def _sshd(config: Path, key: Path, folder: Path) -> Iterator[int]:
    """Takes the settings of the image but for the places of keys, which are a pod's; gives the port."""
    port = free_port(ADDRESS)
    settings = {
        "HostKey": key,
        "AuthorizedKeysFile": f"{key}.pub",
        "ListenAddress": ADDRESS,
        "PidFile": "none",
        "UsePAM": "no",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    with listening(["-f", str(config), "-p", str(port), *options], folder / "sshd.log"):
        yield port


def _make_key(path: Path) -> Path:
    """As the MPI Operator makes one."""
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


def _options(worker: Worker, key: Path, folder: Path) -> str:
    """The launcher's own, where it holds this key."""
    hosts = folder / "known_hosts"
    hosts.write_text(known_host({"CLIPSHIP_SSH_KEY": str(key)}))
    variables = ssh_variables(worker.port, hosts)
    assert len(set(variables.values())) == 1
    return variables["OMPI_MCA_plm_rsh_args"]


def test_the_launcher_is_let_in_and_believes_a_worker_that_has_the_jobs_key(
    worker: Worker, tmp_path: Path
) -> None:
    answer = worker.ssh(_options(worker, worker.key, tmp_path), "-n", "-T", "-E", str(tmp_path / "said"))
    assert answer.returncode == 0, (tmp_path / "said").read_text() + answer.stderr


def test_the_launcher_does_not_believe_whoever_answers_without_the_jobs_key(
    worker: Worker, tmp_path: Path
) -> None:
    other = _make_key(tmp_path / "other")
    answer = worker.ssh(_options(worker, other, tmp_path), "-n", "-T")
    assert answer.returncode == 255
    assert "Host key verification failed" in answer.stderr


@pytest.mark.parametrize("forward", ["-R0:127.0.0.1:1", "-R{folder}/socket:127.0.0.1:1"])
def test_nothing_is_reached_through_a_worker(worker: Worker, forward: str, tmp_path: Path) -> None:
    options = _options(worker, worker.key, tmp_path).replace("LogLevel=ERROR", "LogLevel=INFO")
    answer = worker.ssh(
        options, "-n", "-T", "-N", "-oExitOnForwardFailure=yes", forward.format(folder=tmp_path)
    )
    assert answer.returncode == 255
    assert "remote port forwarding failed" in answer.stderr


def test_in_the_image_ssh_believes_the_holder_of_the_jobs_key_alone(worker: Worker, tmp_path: Path) -> None:
    """Whoever starts ranks by hand there gives no options."""
    (tmp_path / ".ssh").mkdir()
    public = tmp_path / ".ssh" / "id_rsa.pub"
    command = ["env", f"HOME={tmp_path}", "ssh", "-F", str(IMAGE / "ssh-client.conf"), "-p", str(worker.port)]
    command += ["-i", str(worker.key), "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"]
    command += ["-o", f"UserKnownHostsFile={tmp_path}/none", ADDRESS, "true"]
    for key, code in ((worker.key, 0), (_make_key(tmp_path / "other"), 255)):
        public.write_text(Path(f"{key}.pub").read_text())
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert answer.returncode == code, answer.stderr
    public.unlink()
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (answer.returncode, "host key is known" in answer.stderr) == (255, True), answer.stderr
