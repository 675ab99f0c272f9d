"""Has a row of the builders do all its deeds with a small image, as root or as another user.

`deeds` runs it and reads what it prints.

Usage: python -m tests.cluster.image.builder_deeds JOB [USER]
"""

import io
import json
import os
import pwd
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.cluster.image.images import ROOT
from trainer.config import Job
from trainer.config.loader import load_job
from trainer.errors import ClusterError
from trainer.image import builder as builders
from trainer.image.builder import BUILDERS, likely_cause

DOCKERFILE = """\
FROM clipship-test-tiny AS first
RUN --mount=type=secret,id=pip_conf,target=/run/secrets/pip_conf cat /run/secrets/pip_conf >/read
FROM clipship-test-tiny
COPY --from=first /usr/bin/id /opt/
ENV A=b
ENTRYPOINT ["/nowhere"]
ARG REVISION=unknown
LABEL org.opencontainers.image.revision=$REVISION
"""
ADDED = "etc/added"
REVISION = "of-this-build"


def deeds(job: Path, variables: Mapping[str, str], user: str | None = None) -> dict[str, Any]:
    """Returns what a process that does the deeds has told; the job's folder is its own, too."""
    words = [sys.executable, "-m", "tests.cluster.image.builder_deeds", str(job), *filter(None, [user])]
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=job.parent)
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def main(job: Job) -> None:
    tag = job.image.tag or ""
    builder = BUILDERS[job.image.builder]
    for revision in ("of-an-earlier-build", REVISION):  # steps that come from the cache have the first one
        vars(builders)["revision"] = partial(str, revision)
        builder.build(job, {"Dockerfile": DOCKERFILE.encode()})
    stored = builder.stored(tag)
    ran = builder.run(tag, ["sh", "-c", "df /dev/shm; cat /proc/net/dev; echo err >&2; exit 3"])
    with builder.export(stored.id, _added()) as chunks:
        exported = b"".join(chunks)
    with tarfile.open(fileobj=io.BytesIO(exported), mode="r:") as tar:
        names = [name.removeprefix("./") for name in tar.getnames()]
    try:
        missing = str(builder.stored("clipship-test-none:1"))
    except ClusterError as problem:
        missing = str(problem)
    try:
        builder.build(job, {"Dockerfile": DOCKERFILE.replace("clipship-test-tiny", "no/such:1").encode()})
        failed = ""
    except ClusterError as problem:
        failed = str(problem)
    told = {
        "folder": builder.folder(),
        "id": stored.id,
        "labels": dict(stored.labels),
        "env": stored.config["Env"],
        "code": ran.returncode,
        "output": ran.stdout,
        "errors": ran.stderr,
        "names": names,
        "missing": missing,
        "failed": failed,
        "pushed": builder.push(job, tag),
    }
    print(json.dumps(told))


def _added() -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        entry = tarfile.TarInfo(ADDED)
        entry.size = 3
        tar.addfile(entry, io.BytesIO(b"abc"))
    return written.getvalue()


def _become(user: str) -> None:
    """Go on as that user, with all that is read later: only root may read the checkout."""
    likely_cause("")
    entry = pwd.getpwnam(user)
    os.initgroups(user, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)


if __name__ == "__main__":
    asked = load_job(Path(sys.argv[1]))
    if sys.argv[2:]:
        _become(sys.argv[2])
    main(asked)
