"""Each key of a cluster's sections is in a golden, and changes what is rendered.

So shellcheck, hadolint and the API server, which take the goldens, meet every key.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.kubernetes_jobs import CASES as MANIFESTS
from tests.support.kubernetes_jobs import kubernetes_job
from tests.unit.test_image_dockerfile import CASES as DOCKERFILES
from tests.unit.test_image_dockerfile import image_job
from tests.unit.test_slurm_script import CASES as SCRIPTS
from tests.unit.test_slurm_script import job as slurm_job
from trainer.config import Image, Job, Kubernetes, Resources, Slurm, Stack
from trainer.config.image import Site
from trainer.config.kubernetes import Patch
from trainer.config.loader import job_from_table, own_keys
from trainer.config.mirrors import Mirrors
from trainer.config.types import Section
from trainer.errors import InputError
from trainer.image.dockerfile import dockerfile
from trainer.launch.kubernetes.manifest import manifest
from trainer.launch.slurm.script import batch_script

Table = dict[str, Any]
JOB_OF_SCRIPT = re.compile(r"<<'(END_OF_JOB\w*)'\n.*?\n\1\n", re.DOTALL)
JOB_OF_MANIFEST = re.compile(r"^  job\.toml: .*?(?=^  \w|^---$)", re.DOTALL | re.MULTILINE)
HASH_OF_JOB = re.compile(r"^.*org\.clipship\.job=.*$", re.MULTILINE)


@dataclass(frozen=True)
class Door:
    """A place that renders jobs."""

    make: Callable[..., Job]
    cases: Mapping[str, Table]
    """Sections of the jobs whose texts are goldens."""
    render: Callable[[Job], str]
    own_text: re.Pattern[str]
    """Part of the text that has every key of the job in any case."""

    def text(self, table: Table) -> str:
        """Returns what the job's table becomes, without the job itself; the problem if it is refused."""
        try:
            return self.own_text.sub("", self.render(job_from_table(table, "a test's job")))
        except InputError as refused:
            return str(refused)


DOORS = {
    "slurm": Door(slurm_job, SCRIPTS, batch_script, JOB_OF_SCRIPT),
    "kubernetes": Door(kubernetes_job, MANIFESTS, manifest, JOB_OF_MANIFEST),
    "dockerfile": Door(image_job, DOCKERFILES, dockerfile, HASH_OF_JOB),
}
SECTIONS: dict[str, tuple[type[Section], tuple[str, ...]]] = {
    "slurm": (Slurm, ("slurm",)),
    "kubernetes": (Kubernetes, ("kubernetes",)),
    "kubernetes.patch": (Patch, ("kubernetes",)),
    "resources": (Resources, ("slurm", "kubernetes")),
    "image": (Image, ("dockerfile", "kubernetes")),
    "image.site": (Site, ("dockerfile",)),
    "image.mirrors": (Mirrors, ("dockerfile",)),
    "stack": (Stack, ("dockerfile",)),
}
"""Sections with the doors at which their keys have an effect."""
KEYS = [f"{section}.{key}" for section, (model, _) in SECTIONS.items() for key in model.model_fields]
IN_THE_CONTEXT = "the build's context has it, and the Dockerfile is the same for any of these"
WITHOUT_TEXT = {
    "resources.gpu": "`clipship check` estimates with it",
    "resources.gpu_rates": "`clipship check` estimates with it",
    "resources.bind_cpus": "the rank reads it from its job file",
    "slurm.image_dir": "`clipship submit` puts the file that is there into slurm.image",
    "kubernetes.retries": "the pods read it from their job file",
    "kubernetes.workers_ready_s": "the pods read it from their job file",
    "stack.driver": "it is compared with the table",
    "stack.cuda": "it is compared with the table; of a base's torch the build's last step compares it",
    "stack.open_clip": "one value is allowed, which is the default",
    "image.compression": "it is a form in which layers are pushed",
    "image.mirrors.pip": IN_THE_CONTEXT,
    "image.mirrors.apt_security": IN_THE_CONTEXT,
    "image.site.wheelhouse": IN_THE_CONTEXT,
}
"""Keys that a golden has, too, but that change nothing in the text; with the reason."""


@functools.cache
def tables(door: str) -> list[Table]:
    """Returns what the jobs of the door's goldens say themselves."""
    return [own_keys(DOORS[door].make(**sections)) for sections in DOORS[door].cases.values()]


def without(table: Table, path: list[str]) -> Table | None:
    """Returns the table without the key; None if it has none."""
    first, *rest = path
    if first not in table:
        return None
    if not rest:
        return {key: value for key, value in table.items() if key != first}
    inner = without(table[first], rest)
    return None if inner is None else {**table, first: inner}


def pairs(key: str) -> Iterator[tuple[Door, Table, Table]]:
    """Yields each job of a golden that has the key, and the same job without it."""
    for name in SECTIONS[key.rpartition(".")[0]][1]:
        for table in tables(name):
            if (other := without(table, key.split("."))) is not None:
                yield DOORS[name], table, other


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_in_a_golden_and_changes_what_is_rendered(key: str) -> None:
    with_key = list(pairs(key))
    assert with_key, f"no golden has {key}"
    changes = any(door.text(table) != door.text(other) for door, table, other in with_key)
    assert changes is (key not in WITHOUT_TEXT)
