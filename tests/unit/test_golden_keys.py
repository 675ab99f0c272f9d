"""Each key of a cluster's sections is in a golden, and changes what is rendered.

So shellcheck, hadolint and the API server, which take the goldens, meet every key.
"""

import functools
import json
import re
from collections.abc import Iterator

import pytest

from tests.support.command_line import Table, clipship, render
from tests.support.kubernetes_jobs import CASES as MANIFESTS
from tests.support.kubernetes_jobs import kubernetes_job
from tests.support.slurm_jobs import CASES as SCRIPTS
from tests.support.slurm_jobs import slurm_table
from tests.unit.test_image_dockerfile import CASES as DOCKERFILES
from tests.unit.test_image_dockerfile import image_job
from trainer.config.loader import own_keys

OWN_TEXTS = {
    "slurm": re.compile(r"<<'(END_OF_JOB\w*)'\n.*?\n\1\n", re.DOTALL),
    "kubernetes": re.compile(r"^  job\.toml: .*?(?=^  \w|^---$)", re.DOTALL | re.MULTILINE),
    "dockerfile": re.compile(r"^.*org\.clipship\.job=.*$", re.MULTILINE),
}
"""Part of each text that has every key of the job in any case."""
SECTIONS = {
    "slurm": ("slurm",),
    "kubernetes": ("kubernetes",),
    "kubernetes.patch": ("kubernetes",),
    "resources": ("slurm", "kubernetes"),
    "image": ("dockerfile", "kubernetes"),
    "image.site": ("dockerfile",),
    "image.mirrors": ("dockerfile",),
    "stack": ("dockerfile",),
}
"""Sections with the texts in which their keys have an effect."""
KEYS = [
    f"{section}.{key}"
    for section in SECTIONS
    for key in json.loads(clipship("explain", section, "--json").out)["properties"]
]
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
def tables(kind: str) -> list[Table]:
    """Returns what the jobs of the goldens of a kind say themselves."""
    if kind == "slurm":
        return [slurm_table(**sections) for sections in SCRIPTS.values()]
    if kind == "kubernetes":
        return [own_keys(kubernetes_job(**sections)) for sections in MANIFESTS.values()]
    return [own_keys(image_job(**sections)) for sections in DOCKERFILES.values()]


def without(table: Table, path: list[str]) -> Table | None:
    """Returns the table without the key; None if it has none."""
    first, *rest = path
    if first not in table:
        return None
    if not rest:
        return {key: value for key, value in table.items() if key != first}
    inner = without(table[first], rest)
    return None if inner is None else {**table, first: inner}


def pairs(key: str) -> Iterator[tuple[str, Table, Table]]:
    """Yields each job of a golden that has the key, and the same job without it."""
    for kind in SECTIONS[key.rpartition(".")[0]]:
        for table in tables(kind):
            if (other := without(table, key.split("."))) is not None:
                yield kind, table, other


def text(kind: str, table: Table) -> str:
    """Returns what the job's table becomes, without the job itself; the problem if it is refused."""
    said = render(kind, table)
    return OWN_TEXTS[kind].sub("", said.out) if said.code == 0 else said.err


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_in_a_golden_and_changes_what_is_rendered(key: str) -> None:
    with_key = list(pairs(key))
    assert with_key, f"no golden has {key}"
    changes = any(text(kind, table) != text(kind, other) for kind, table, other in with_key)
    assert changes is (key not in WITHOUT_TEXT)
