"""Logs of the pods of a run.

mpirun brings the output of all ranks to the launcher; elsewhere the pod of index 0 has that of rank 0. Either
may be a sequence of pods. Imports no torch.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kubernetes.client.exceptions import ApiException
from kubernetes.stream import stream
from kubernetes.stream.ws_client import WebSocketConnectionClosedException

from trainer.errors import ClusterError, InputError
from trainer.launch.kubernetes.cluster import Cluster
from trainer.launch.kubernetes.kind import Kind, Object
from trainer.launch.kubernetes.state import output_pods, pods_of

_POLL_S = 1.0
_TIME = re.compile(r"\d{4}-\d\d-\d\dT")
"""Beginning of the time before a line, which always has nine digits of a second."""
_BY_SIGNAL = 128
"""Exit codes of commands that a signal ended are above this."""
_SETTLE_S = 3
"""Seconds until the API server knows that a container has ended."""


def output_lines(cluster: Cluster, row: type[Kind], name: str, follow: bool) -> Iterator[str]:
    """Yields the lines of every pod with the run's output, one after the other.

    With `follow`, until the object has ended. Raises InputError if no such pod has begun.
    """
    shown: set[str] = set()
    while True:
        found = cluster.read(row, name)
        ended = found is None or bool(row.ended_at(found))
        new = [
            pod
            for pod in output_pods(row, pods_of(cluster, row, name))
            if pod["metadata"]["name"] not in shown and _has_begun(pod)
        ]
        for pod in new:
            shown.add(pod["metadata"]["name"])
            yield from (
                _followed(cluster, row, name, pod["metadata"]["name"])
                if follow
                else _lines(cluster, pod["metadata"]["name"])
            )
        if not shown and not follow:
            raise InputError(
                f"{row.kind} {cluster.namespace}/{name} has no {row.output_pod} that has started: `clipship "
                "status` says what it waits for"
            )
        if not follow or (ended and not new):
            return
        if not new:
            time.sleep(_POLL_S)


def rank_lines(cluster: Cluster, row: type[Kind], name: str, rank: int, follow: bool) -> Iterator[str]:
    """Yields the lines of one rank's log file, read by `tail` in a running pod.

    Raises InputError if no pod is running, ClusterError if the file cannot be read.
    """
    running = [pod for pod in pods_of(cluster, row, name) if pod["status"].get("phase") == "Running"]
    if not running:
        raise InputError(
            f"no pod of {cluster.namespace}/{name} is running, so rank {rank}'s log cannot be read here: it "
            "is in the run folder, on its volume"
        )
    script = (
        "import os, sys; from pathlib import Path; from trainer.config.loader import load_job;"
        " from trainer.run.folder import run_folder; from trainer.run.layout import LOGS, rank_log;"
        " path = run_folder(load_job(Path('/etc/clipship/job.toml'))) / LOGS / rank_log(int(sys.argv[1]));"
        " os.execvp('tail', ['tail', '-n', '+1', *sys.argv[2:], str(path)])"
    )
    command = ["/opt/clipship/bin/python", "-P", "-c", script, str(rank), *(["-f"] if follow else [])]
    pod = running[-1]["metadata"]["name"]
    with cluster.asking("read a file in a pod"):
        answer = stream(
            cluster.core.connect_get_namespaced_pod_exec,
            pod,
            cluster.namespace,
            command=command,
            stdout=True,
            stderr=True,
            _preload_content=False,
        )
    with disconnecting(answer):
        try:
            yield from _output_lines(answer)
            code = answer.returncode  # of an answer without a code, the client's own reading fails
        except (WebSocketConnectionClosedException, OSError, TypeError, ValueError, LookupError) as problem:
            raise ClusterError(f"the connection to pod {pod} ended: {problem}") from None
        if code and not (follow and code > _BY_SIGNAL):  # `tail -f` is killed when its pod ends
            message = answer.read_stderr(timeout=0).strip() or f"exit code {code}"
            raise ClusterError(f"rank {rank}'s log cannot be read in pod {pod}: {message}")


@contextmanager
def disconnecting(answer: Any) -> Iterator[None]:
    """Closes the connection of `stream`: the client leaves the socket open if the other side closed first."""
    try:
        yield
    finally:
        answer.close()
        answer.sock.shutdown()


def _output_lines(answer: Any) -> Iterator[str]:
    """Yields the lines of the command's stdout as they arrive."""
    rest = ""
    while answer.is_open():
        answer.update(timeout=_POLL_S)
        *whole, rest = (rest + (answer.read_stdout(timeout=0) or "")).split("\n")
        yield from whole
    if rest:
        yield rest


def _has_begun(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Running", "Succeeded", "Failed")


def _followed(cluster: Cluster, row: type[Kind], name: str, pod: str) -> Iterator[str]:
    """Yields the pod's lines until it has ended, each once.

    A stream may end earlier without an error, for example when the node's kubelet restarts. The whole log is
    then read again, and the time of each line tells which were shown.
    """
    newest = ("", 0)
    while True:
        at = ("", 0)
        for stamped in _lines(cluster, pod, follow=True):
            time_, _, line = stamped.partition(" ")
            if not _TIME.match(time_):  # the kubelet's own words
                yield stamped
                continue
            at = (time_, at[1] + 1 if time_ == at[0] else 1)  # the second, third, ... line of that time
            if at > newest:
                newest = at
                yield line
        time.sleep(_SETTLE_S)
        status: Object = next(
            (each["status"] for each in pods_of(cluster, row, name) if each["metadata"]["name"] == pod), {}
        )
        if not any(
            "running" in container.get("state", {}) for container in status.get("containerStatuses", ())
        ):
            return


def _lines(cluster: Cluster, pod: str, follow: bool = False) -> Iterator[str]:
    """Yields the lines of a pod's log; with `follow`, until the stream ends, each behind its time."""
    with cluster.asking(f"read the log of {pod}"):
        try:
            answer = cluster.core.read_namespaced_pod_log(
                pod, cluster.namespace, follow=follow, timestamps=follow, _preload_content=False
            )
        except ApiException as problem:
            if problem.status == 404:
                return  # the pod was deleted in between
            raise
        rest = b""
        for chunk in answer.stream(amt=None):
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
        if rest:
            yield rest.decode(errors="replace")
