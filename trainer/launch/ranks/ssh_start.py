"""Starts a rank's supervisor on a host, here or over ssh.

The environment reaches another host through standard input: a command line can be read by everybody on the
machine. No torch.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from signal import SIGTERM

from trainer.launch.ranks.started_ranks import StartedRank
from trainer.sysinfo.addresses import is_here
from trainer.sysinfo.parent import signal_with_parent
from trainer.world.rendezvous import TOKEN
from trainer.world.variables import RESPAWNED

_MEMBER = "CLIPSHIP_MEMBER"
"""Variable with the run's token and the number of a supervisor, by which its processes are found again."""
_OWN_TO_A_HOST = ("SSH_", "BASH_FUNC_", "OLDPWD")
_REMOTE_START = f"""\
import glob, json, os, signal, sys
message = json.loads(sys.stdin.buffer.readline())
os.environ.update(message["variables"])
mark = os.fsencode("{_MEMBER}=" + os.environ["{_MEMBER}"])
for place in glob.glob("/proc/[0-9]*/environ") if "{RESPAWNED}" in os.environ else ():
    try:
        if mark in open(place, "rb").read().split(b"\\0"):
            os.kill(int(place.split("/")[2]), signal.SIGKILL)
    except OSError:
        pass
try:
    os.chdir(message["folder"])
except OSError:
    pass
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.execvp(message["command"][0], message["command"])
"""
"""Python program for another host: reads the environment from stdin, becomes the rank's command.

If ssh lost the host, a supervisor may still run there, whose output goes nowhere: its successor kills it.
"""


def start_on(
    host: str, command: Sequence[str], variables: Mapping[str, str], ssh: Sequence[str], member: int
) -> StartedRank:
    """Starts supervisor number `member` on the host, with this process's environment and `variables`.

    `ssh` holds the words of the command that reaches other hosts. Raises OSError.
    """
    if is_here(host):
        return start_here(command, variables)
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OWN_TO_A_HOST)}
    mark = {_MEMBER: f"{os.environ.get(TOKEN, '')}.{member}"}
    message = {"variables": {**own, **variables, **mark}, "folder": os.getcwd(), "command": command}
    remote_command = shlex.join([sys.executable, "-P", "-c", _REMOTE_START])
    process = subprocess.Popen([*ssh, host, remote_command], stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.close()
    except BrokenPipeError:
        pass  # ssh has ended, and it prints why
    return StartedRank(process, host)


def start_here(
    command: Sequence[str], variables: Mapping[str, str], stdin: int | None = subprocess.DEVNULL
) -> StartedRank:
    """Starts the command on this machine, with this process's environment and `variables`.

    It gets SIGTERM if this process dies, which a launcher's end may do before its own: it saves and leaves.
    """
    return StartedRank(
        subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=stdin,
            preexec_fn=partial(signal_with_parent, SIGTERM),
        )
    )
