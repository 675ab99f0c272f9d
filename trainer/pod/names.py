"""What the MPIJob's manifest and the first processes of its pods agree on. No torch."""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainer.errors import InputError
from trainer.health.tree import Meeting

SSH_KEY = "CLIPSHIP_SSH_KEY"
"""Path of the private key that the operator made for this job and mounts into its pods, and into no other."""
JOB_UID = "CLIPSHIP_LAUNCHER_JOB"
"""Same for every launcher pod of one submission."""


def meeting(env: Mapping[str, str]) -> Meeting:
    """Where the supervisors meet. Their token follows from the job's ssh key: all pods have it, in no variable and on no command line,
    and a launcher that takes another's place can still talk to the ranks that it finds. Raises InputError where it cannot."""
    place = Meeting.from_env(env)
    if place is None:
        raise InputError("CLIPSHIP_SUPERVISORS is not set: this process starts in a pod of an MPIJob that clipship rendered")
    try:
        key = Path(env[SSH_KEY]).read_bytes()
    except (KeyError, OSError) as problem:
        raise InputError(
            f"{SSH_KEY} names no ssh key that can be read ({problem}): the MPI Operator mounts it at sshAuthMountPath"
        ) from None
    return replace(place, token=hmac.new(key, b"clipship supervisors", hashlib.sha256).hexdigest())
