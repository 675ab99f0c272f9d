"""Last word of a pod: the message that `kubectl describe pod` shows. Imports no torch."""

from contextlib import suppress
from pathlib import Path

from trainer.text.terminal import say, shown

TERMINATION_LOG = Path("/dev/termination-log")
_MESSAGE_BYTES = 3000  # Kubernetes keeps 4096 bytes for a pod


def leave(code: int, message: str) -> int:
    """Write the message as the pod's last word and return the exit code.

    `kubectl describe pod` shows it, and it is the log's last line.
    """
    with suppress(OSError):
        TERMINATION_LOG.write_text(
            shown(message).encode()[:_MESSAGE_BYTES].decode(errors="ignore"), encoding="utf-8"
        )
    say(f"{message} (exit code {code})" if code else message)
    return code
