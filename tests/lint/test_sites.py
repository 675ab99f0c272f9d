"""Every job file of docs/sites.md is rendered for its cluster, without a warning, and linted."""

import pytest
import yaml

from tests.support.linters import hadolint, shellcheck
from tests.support.site_jobs import PAGE, site_jobs
from trainer.config import Job
from trainer.image.compatibility import check_stack
from trainer.image.dockerfile import dockerfile
from trainer.launch.kubernetes.manifest import manifest
from trainer.launch.slurm.script import batch_script
from trainer.plan.describe import Facts, all_warnings
from trainer.plan.unused_keys import unused_keys

JOBS = site_jobs()


def of(scheduler: str) -> list[str]:
    return [name for name, job in JOBS.items() if list(job.schedulers) == [scheduler]]


def test_the_page_has_a_job_for_each_kind_of_site() -> None:
    assert set(of("slurm")) == {"infiniband", "pyxis", "apptainer", "slinky", "soperator", "china"}
    assert set(of("kubernetes")) == {"eks", "gke", "aks"}
    assert {job.resources.fabric for job in JOBS.values()} == {"ib", "efa", "tcpxo"}
    assert {job.slurm.container for name, job in JOBS.items() if name in of("slurm")} == {
        "none",
        "pyxis",
        "apptainer",
    }


@pytest.mark.parametrize("name", JOBS)
def test_nothing_about_it_is_doubtful(name: str) -> None:
    job = JOBS[name]
    check_stack(job)
    facts = Facts.of(job, job.resources.world_size, None, local=False, files=False)
    said = [text for text in all_warnings(facts) if "is a placeholder" not in text]  # the page's registry
    assert said == []
    assert list(unused_keys(job)) == []


@pytest.mark.parametrize("name", of("slurm"))
def test_its_batch_script_passes_shellcheck(name: str) -> None:
    assert shellcheck(batch_script(JOBS[name])) == ""


@pytest.mark.parametrize("name", of("kubernetes"))
def test_its_manifest_asks_for_the_adapters_of_its_network(name: str) -> None:
    job: Job = JOBS[name]
    [pods] = [item for item in yaml.safe_load_all(manifest(job)) if item["kind"] == "Job"]
    spec = pods["spec"]["template"]["spec"]
    [worker] = spec["containers"]
    asked = worker["resources"]["limits"]
    assert asked["nvidia.com/gpu"] == "8"
    assert {key: asked[key] for key in job.kubernetes.rdma} == {
        key: str(count) for key, count in job.kubernetes.rdma.items()
    }
    added = worker["securityContext"]["capabilities"].get("add", [])
    assert ("IPC_LOCK" in added) is bool(job.kubernetes.rdma)


@pytest.mark.parametrize("name", [name for name in JOBS if JOBS[name].image.tag])
def test_its_dockerfile_passes_hadolint(name: str) -> None:
    assert hadolint(dockerfile(JOBS[name])) == ""


def test_each_site_names_its_sources() -> None:
    _, _, sources = PAGE.read_text().partition("\n## Sources\n")
    rows = [line for line in sources.splitlines() if "](https://" in line]
    assert len(rows) == len(JOBS)
