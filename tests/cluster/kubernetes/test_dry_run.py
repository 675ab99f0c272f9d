"""Every rendered variant, tried by the API server; and what it refuses, in words."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes import client

from tests.cluster.kubernetes.crds import hand_written, is_part, own
from tests.cluster.kubernetes.programs import kubectl
from tests.cluster.kubernetes.runs import Demo
from tests.support.kubernetes_jobs import CASES, kubernetes_job
from tests.support.site_jobs import site_jobs
from trainer.launch.kubernetes.cluster import Cluster
from trainer.launch.kubernetes.kinds import KINDS
from trainer.launch.kubernetes.manifest import manifest

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(300)]

MPIJOB = KINDS["mpijob"]
GROUP, VERSION = MPIJOB.api_version.split("/")
MPIJOBS = [case for case, sections in CASES.items() if kubernetes_job(**sections).kubernetes.kind == "mpijob"]
JOBSETS = ("jobset.x-k8s.io", "v1alpha2")
NO_IMAGE = {"tag": "clipship-test:missing"}
"""Of a job whose pods need none: they wait for it."""
ELSEWHERE = {"priorityClassName", "serviceAccountName", "runtimeClassName"}
"""Fields that name things which the API server looks for and the cluster of a test does not have."""


SITES = {name: job for name, job in site_jobs().items() if "kubernetes" in job.schedulers}
JOBS = {**{case: kubernetes_job(**sections) for case, sections in CASES.items()}, **SITES}


@pytest.mark.usefixtures("other_kinds")
@pytest.mark.parametrize("case", JOBS)
def test_the_api_server_accepts_every_variant(case: str, cluster: Cluster) -> None:
    *beside, wanted = yaml.safe_load_all(manifest(JOBS[case]))
    row = next(row for row in KINDS.values() if row.kind == wanted["kind"])
    options = {"dryRun": "All", "fieldValidation": "Strict"}
    for found in (*beside, wanted):
        found["metadata"]["namespace"] = cluster.namespace
    for found in beside:
        plural = f"{found['kind'].lower()}s".replace("ys", "ies")
        accepted = cluster.ask("post", found["apiVersion"], plural, body=found, **options)
        content = "data" if found["kind"] == "ConfigMap" else "spec"
        assert within(found[content], accepted[content]), "the server dropped or changed something"
    kept = cluster.create(row, wanted, **options)
    assert within(wanted["spec"], kept["spec"]), "the server dropped or changed something"
    for role, part in row.pods([*beside, wanted]).items():
        cluster.ask("post", "v1", "pods", body=pod(role, part["template"]), **options)
        if row.name_in_job == "trainjob":  # Kubeflow Trainer and JobSet make a Job of this part
            made = {"metadata": {"name": "made-of-a-trainjob"}, "spec": part}
            kept = cluster.ask("post", "batch/v1", "jobs", body=made, **options)
            assert within(part, kept["spec"]), "the server dropped or changed something"
    for found in beside:
        if found["kind"] == "TrainingRuntime" and serves_jobsets(cluster):
            spec = found["spec"]["template"]["spec"]
            version = "/".join(JOBSETS)
            jobset = {"apiVersion": version, "kind": "JobSet", "metadata": {"name": "made"}, "spec": spec}
            made = cluster.ask("post", version, "jobsets", body=jobset, **options)
            assert within(spec, made["spec"]), "the server dropped or changed something"


def serves_jobsets(cluster: Cluster) -> bool:
    """Returns whether JobSet's own kind is there: the hand-written definitions have none."""
    return JOBSETS[0] in {group.name for group in client.ApisApi(cluster.api).get_api_versions().groups}


@pytest.mark.parametrize("name", sorted(hand_written().keys() & own().keys()))
def test_a_hand_written_kind_is_a_part_of_its_projects_own(name: str) -> None:
    ours, theirs = hand_written()[name], own()[name]
    schemas = [crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for crd in (ours, theirs)]
    assert is_part(*schemas) == []
    assert ours["spec"]["names"]["plural"] == theirs["spec"]["names"]["plural"]
    assert ours["spec"]["versions"][0]["name"] == theirs["spec"]["versions"][0]["name"]


@pytest.fixture(scope="module")
def schema(cluster: Cluster) -> Any:
    """The operator's own, from the cluster, or from a file that holds its CustomResourceDefinition."""
    if "CLIPSHIP_MPIJOB_CRD" in os.environ:
        crd = yaml.safe_load(Path(os.environ["CLIPSHIP_MPIJOB_CRD"]).read_text())
    else:
        name = f"{MPIJOB.plural}.{GROUP}"
        read = client.ApiextensionsV1Api(cluster.api).read_custom_resource_definition(name)
        crd = cluster.api.sanitize_for_serialization(read)
    versions = {version["name"]: version for version in crd["spec"]["versions"]}
    return versions[VERSION]["schema"]["openAPIV3Schema"]


@pytest.mark.parametrize("case", MPIJOBS)
def test_every_variant_satisfies_the_operators_own_schema(case: str, schema: Any) -> None:
    mpijob = list(yaml.safe_load_all(manifest(kubernetes_job(**CASES[case]))))[-1]
    jsonschema.validate(mpijob, closed(schema))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            {**mpijob, "spec": {**mpijob["spec"], "launcherCreationPolcy": "AtStartup"}}, closed(schema)
        )


def closed(schema: Any) -> Any:
    """The schema with unknown keys refused, which Kubernetes would drop silently."""
    if isinstance(schema, list):
        return [closed(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    tight = {key: closed(inner) for key, inner in schema.items()}
    if (
        schema.get("type") == "object"
        and "properties" in schema
        and schema["properties"].keys() != {"annotations"}
    ):
        tight.setdefault("additionalProperties", False)
    if "x-kubernetes-int-or-string" in tight:
        tight.pop("type", None)
    if tight.get("properties", {}).get("metadata") == {"type": "object"}:
        tight["properties"]["metadata"] = {}
    return tight


def within(asked: Any, kept: Any) -> bool:
    """Defaults may have come to it."""
    if isinstance(asked, dict):
        return all(key in kept and within(value, kept[key]) for key, value in asked.items())
    if isinstance(asked, list):
        return len(asked) == len(kept) and all(map(within, asked, kept))
    return bool(asked == kept)


def pod(role: str, template: Any) -> Any:
    found = deepcopy(template) | {"apiVersion": "v1", "kind": "Pod"}
    found["metadata"] |= {"generateName": f"{role.lower()}-"}
    found["spec"] = {key: value for key, value in found["spec"].items() if key not in ELSEWHERE}
    return found


def test_a_field_that_kubernetes_does_not_know_is_refused(demo: Demo) -> None:
    path = demo.write("unknown", kubernetes={"patch": {"worker": {"spec": {"hostNetwrk": True}}}})
    answer = demo.clipship("submit", str(path), "--to", "kubernetes", code=1)
    assert "hostNetwrk" in answer.stderr


NOBODY = {"both": {"spec": {"serviceAccountName": "nobody"}}}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"namespace": "nowhere"}, "the namespace does not exist"),
        (
            {"mounts": {"/more": "pvc:missing"}, "env": {"KEY": "secret:wandb:key"}},
            "has no PersistentVolumeClaim missing and no Secret wandb",
        ),
        ({"priority_class": "high"}, "no PriorityClass with name high"),
        ({"patch": NOBODY}, 'serviceaccount "nobody" not found'),
    ],
    ids=["namespace", "claim and secret", "priority class", "service account"],
)
def test_what_is_not_there_is_named(demo: Demo, keys: dict[str, Any], said: str) -> None:
    if mounts := keys.get("mounts"):
        keys = {**keys, "mounts": {str(demo.folder): f"host:{demo.folder}", **mounts}}
    refused(demo, said, **keys)


def test_what_others_made_under_the_names_of_the_job_is_left_alone(demo: Demo) -> None:
    job = demo.write("taken", image=NO_IMAGE)
    text = demo.clipship("render", "kubernetes", str(job)).stdout
    theirs = text.replace("app.kubernetes.io/name", "example.com/name")
    config_map, policy, mpijob = theirs.split("\n---\n")
    for made, said, code in (
        (policy, "has a NetworkPolicy", 1),
        (config_map, "has a ConfigMap", 1),
        (mpijob, "already exists and is not Clipship's", 2),
    ):
        kubectl("apply", "--filename=-", given=made)
        answer = demo.clipship("submit", str(job), "--to", "kubernetes")
        assert (answer.returncode, said in answer.stderr) == (code, True), answer.stderr
    kubectl("get", "--filename=-", given=theirs)


@contextmanager
def quota(demo: Demo, **hard: str) -> Iterator[None]:
    core, place = demo.cluster.core, ("small", demo.cluster.namespace)
    about = {"metadata": {"name": "small"}, "spec": {"hard": hard}}
    core.create_namespaced_resource_quota(demo.cluster.namespace, about)
    demo.until(
        lambda: bool(
            core.read_namespaced_resource_quota(*place).status.used
        ),  # until then it refuses nothing
        lambda: "nobody counts what the quota is for: is the cluster's controller manager well?",
        0.2,
    )
    try:
        yield
    finally:
        core.delete_namespaced_resource_quota(*place)


def test_a_quota_is_explained(demo: Demo) -> None:
    with quota(demo, **{"requests.cpu": "1"}):
        refused(demo, "it would exceed the quota", cpu_request=8.0)
    limited = [{"name": "launcher", "resources": {"limits": {"cpu": "1"}}}]
    patch = {"launcher": {"spec": {"containers": limited}}}
    with quota(demo, **{"limits.cpu": "100"}):
        refused(demo, "create a worker pod", cpu_limit=False, patch=patch)
        refused(demo, "must specify limits.cpu for: launcher", cpu_limit=True)
        keys = {"cpu_limit": True, "patch": patch, "priority_class": "high"}
        refused(demo, "no PriorityClass with name high", **keys)


def test_a_user_who_may_not_is_told_what_they_may_not(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig(demo.cluster, user(demo.cluster, "guest"), tmp_path))
    refused(demo, "you lack the permission: mpijobs.kubeflow.org")


RULES = [
    {"apiGroups": [""], "resources": ["pods", "configmaps"], "verbs": ["*"]},
    {"apiGroups": ["kubeflow.org"], "resources": ["mpijobs"], "verbs": ["*"]},
]
"""A user's who may train, and is given no NetworkPolicies."""


def test_a_user_who_may_make_no_network_policies_is_told_the_key(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = demo.cluster
    token = user(cluster, "trainee")
    access = client.RbacAuthorizationV1Api(cluster.api)
    access.create_namespaced_role(cluster.namespace, {"metadata": {"name": "train"}, "rules": RULES})
    subject = {"kind": "ServiceAccount", "name": "trainee", "namespace": cluster.namespace}
    role = {"kind": "Role", "name": "train", "apiGroup": "rbac.authorization.k8s.io"}
    access.create_namespaced_role_binding(
        cluster.namespace, {"metadata": {"name": "train"}, "roleRef": role, "subjects": [subject]}
    )
    monkeypatch.setenv("KUBECONFIG", kubeconfig(cluster, token, tmp_path))
    refused(
        demo,
        "or set kubernetes.network_policy = false: then anything that reaches the pods may connect to them",
    )
    demo.submit("open", image=NO_IMAGE, kubernetes={"network_policy": False})
    demo.clipship("cancel", str(demo.run("open")), code=0)


@pytest.mark.parametrize("made_by", ["submit", "kubectl"])
def test_a_cancelled_job_leaves_no_network_policy_and_no_config_map(made_by: str, demo: Demo) -> None:
    name = f"cleared-{made_by}"
    if made_by == "submit":
        demo.submit(name, image=NO_IMAGE)
    else:
        job = demo.write(name, image=NO_IMAGE)
        kubectl("apply", "--filename=-", given=demo.clipship("render", "kubernetes", str(job)).stdout)
        assert demo.clipship("status", str(job)).returncode == 0  # knows it now
    policies = ("networking.k8s.io/v1", "networkpolicies")
    policy = demo.cluster.ask("get", *policies, f"{name}-job")
    demo.until(lambda: bool(demo.pods(name, "worker")), lambda: "no pods")
    for pod in demo.pods(name, "worker"):
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    demo.clipship("cancel", str(demo.run(name)), code=0)

    def left() -> list[str]:
        lists = [demo.cluster.ask("get", *kind)["items"] for kind in (policies, ("v1", "configmaps"))]
        names = [item["metadata"]["name"] for found in lists for item in found]
        return [found for found in names if found == f"{name}-job"]

    demo.until(lambda: not left(), lambda: f"{left()} is left")


def test_a_cluster_that_does_not_know_the_user_or_does_not_answer_or_is_not_named_is_told(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig(demo.cluster, "nonsense", tmp_path))
    refused(demo, "the cluster does not know you")
    kubeconfig(demo.cluster, "x", tmp_path, server="https://127.0.0.1:9")
    refused(demo, "does not answer at https://127.0.0.1:9")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    refused(demo, "set KUBECONFIG")


def refused(demo: Demo, expected: str, **keys: Any) -> None:
    path = demo.write("refused", kubernetes=keys)
    answer = demo.clipship("submit", str(path), "--to", "kubernetes", code=1)
    assert expected in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""


def user(cluster: Cluster, name: str) -> str:
    """Makes a service account; returns a token of it."""
    cluster.core.create_namespaced_service_account(cluster.namespace, {"metadata": {"name": name}})
    made = cluster.core.create_namespaced_service_account_token(name, cluster.namespace, {"spec": {}})
    return str(made.status.token)


def kubeconfig(cluster: Cluster, token: str, folder: Path, server: str | None = None) -> str:
    """Writes the kubeconfig of another user of the same cluster; returns its path."""
    settings, path = cluster.api.configuration, folder / "kubeconfig"
    where = {"server": server or settings.host, "certificate-authority": settings.ssl_ca_cert}
    about = {
        "clusters": [{"name": "c", "cluster": where}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "u", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "u",
    }
    path.write_text(yaml.safe_dump(about))
    return str(path)


def test_a_sweep_submits_an_object_for_each_run_and_none_twice(demo: Demo) -> None:
    job = demo.write("swept", image=NO_IMAGE, kubernetes={"kind": "job"})
    words = ("sweep", str(job), "--grid", "seed=0,1", "--to", "kubernetes")
    ids = [f"{demo.cluster.namespace}/swept-seed-{seed}" for seed in (0, 1)]
    submitted = demo.clipship(*words)
    assert (submitted.returncode, submitted.stdout.split()) == (0, ids), submitted.stderr
    again = demo.clipship(*words)
    assert (again.returncode, again.stdout) == (0, ""), again.stderr
    listed = demo.clipship(*words, "--list").stdout.splitlines()
    assert [row.split()[:2] for row in listed[1:]] == [["swept-seed-0", "0"], ["swept-seed-1", "1"]]
    table = demo.clipship("runs", str(demo.folder / "runs")).stdout
    assert all(f"kubernetes {name}" in table for name in ids), table
    demo.clipship("report", str(demo.folder / "runs" / "swept-sweep"), code=0)
    for seed in (0, 1):
        cancelled = demo.clipship("cancel", str(demo.run(f"swept-seed-{seed}")))
        assert (cancelled.returncode, "is deleted" in cancelled.stderr) == (0, True), cancelled.stderr


def test_an_mpijob_that_kubectl_made_is_known_to_clipship(demo: Demo) -> None:
    job = demo.write("applied", image=NO_IMAGE)
    before = demo.clipship("status", str(job))
    assert (before.returncode, "has no run folder here" in before.stderr) == (2, True)
    kubectl("apply", "--filename=-", given=demo.clipship("render", "kubernetes", str(job)).stdout)
    status = demo.clipship("status", str(job), code=0)
    assert "workers     0 of 2 ready\n" in status.stdout
    cancelled = demo.clipship("cancel", str(demo.run("applied")))  # recorded now
    assert (cancelled.returncode, "/applied is deleted" in cancelled.stderr) == (0, True)


def test_an_mpijob_submitted_later_under_the_same_name_is_not_taken_for_this_runs(demo: Demo) -> None:
    demo.submit("again", image=NO_IMAGE)
    record = demo.run("again") / "artefacts" / "submission.json"
    before = demo.elsewhere("again")
    demo.clipship("cancel", str(before), code=0)
    demo.submit("again", image=NO_IMAGE)
    now = json.loads(record.read_text())["details"]["uid"]
    assert now not in (before / "artefacts" / "submission.json").read_text()
    status, cancelled, logs = (demo.clipship(word, str(before)) for word in ("status", "cancel", "logs"))
    assert "gone: the MPIJob of this run was deleted" in status.stdout
    assert (
        "another MPIJob of the same name, submitted later; nothing is deleted"
        in cancelled.stdout + cancelled.stderr
    )
    assert (logs.returncode, "submitted later" in logs.stderr) == (2, True)
    assert not demo.state("again").startswith("gone")
