"""Stands in for srun with NVIDIA's pyxis: takes its documented options alone, and does to a task's
environment what pyxis was seen to do.

The image wins for names that both have, unless --container-env names them; PATH, LD_LIBRARY_PATH and the
locale never come from the job. There is no container: the files are the node's. Called as
`python pyxis_srun.py SRUN IMAGE.json WORD ...`.
"""

import json
import os
import sys
from pathlib import Path

WITH_VALUE = {"image", "mounts", "workdir", "name", "save", "env"}
FLAGS = {"mount-home", "remap-root", "entrypoint", "writable", "readonly"}
DROPPED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LANGUAGE", "LC_ALL")


def main(srun: str, image: str, *words: str) -> None:
    options = {word for word in words if word.startswith(("--container-", "--no-container-"))}
    values = dict(_parsed(word) for word in options)
    rest = [word for word in words if word not in options]
    if "image" not in values:
        os.execv(srun, [srun, *words])
    for mount in values.get("mounts", "").split(","):
        source, _, place = mount.partition(":")
        if not Path(source).exists() or not place.startswith("/"):
            sys.exit(f"pyxis: cannot mount {mount!r}")
    command = next(at for at, word in enumerate(rest) if not word.startswith("-"))
    task = [sys.executable, __file__, "--task", image, values.get("env", "")]
    os.execv(srun, [srun, *rest[:command], *task, *rest[command:]])


def task(image: str, named: str, *command: str) -> None:
    """In the task: the environment that a container would have."""
    of_image = json.loads(Path(image).read_text())
    listed = set(named.split(",")) if named else set()
    of_job = {
        name: value
        for name, value in os.environ.items()
        if name in listed or name not in (*DROPPED, *of_image)
    }
    os.execve(command[0], list(command), {**of_image, "PATH": "/usr/bin:/bin", **of_job})


def _parsed(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    plain = name.removeprefix("--no-container-").removeprefix("--container-")
    known = WITH_VALUE if equals else FLAGS
    if plain not in known or (name.startswith("--no-") and equals):
        sys.exit(f"pyxis: no option {word!r}")
    return plain, value


if __name__ == "__main__":
    (task if sys.argv[1] == "--task" else main)(*sys.argv[2:] if sys.argv[1] == "--task" else sys.argv[1:])
