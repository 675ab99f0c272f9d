"""Names and keys that the manifests share with the first processes of its pods. Imports no torch."""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainer.errors import InputError
from trainer.world.rendezvous import Rendezvous
from trainer.world.variables import SUBMISSION

SSH_KEY = "CLIPSHIP_SSH_KEY"
"""Variable with the path of the private key that the operator made for this job and mounts only into its
pods."""
JOB_UID = SUBMISSION
"""Variable with the uid of what was submitted, or with another id that only its pods have."""


def known_host(env: Mapping[str, str]) -> str:
    """Returns a line for known_hosts that covers every worker: sshd shows the job's key as its host key.

    Raises InputError if the key's public half cannot be read.
    """
    try:
        kind, key = Path(f"{env[SSH_KEY]}.pub").read_text(encoding="utf-8").split()[:2]
    except (KeyError, OSError, ValueError) as problem:
        raise InputError(
            f"the public half of the key that {SSH_KEY} names cannot be read ({problem}): the MPI Operator "
            "mounts both halves at sshAuthMountPath"
        ) from None
    return f"* {kind} {key}\n"


def rendezvous(env: Mapping[str, str]) -> Rendezvous:
    """Returns the address at which the supervisors meet, with their token.

    The token follows from the job's ssh key: all pods have it, it is in no variable and on no command line,
    and a launcher that replaces another can still talk to the ranks that it finds. Raises InputError if
    address or key is missing.
    """
    place = Rendezvous.from_env(env)
    if place is None:
        raise InputError(
            "CLIPSHIP_SUPERVISORS is not set: run this in a pod of an MPIJob that clipship has rendered"
        )
    try:
        key = Path(env[SSH_KEY]).read_bytes()
    except (KeyError, OSError) as problem:
        raise InputError(
            f"{SSH_KEY} names no ssh key that can be read ({problem}): the MPI Operator mounts it at "
            "sshAuthMountPath"
        ) from None
    return replace(place, token=hmac.new(key, b"clipship supervisors", hashlib.sha256).hexdigest())
