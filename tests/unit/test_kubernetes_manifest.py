"""The manifests: their whole text, what its values become, what it refuses.

tests/cluster/kubernetes has a real cluster.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.command_line import Said, joined, render
from tests.support.kubernetes_jobs import CASES, HOROVOD, TOPOLOGY, kubernetes_job, objects_of
from trainer.config.loader import load_job, own_keys
from trainer.launch.kubernetes.patch import merged
from trainer.text.yaml_text import yaml as quoted
from trainer.text.yaml_text import yaml_block

BASE = own_keys(kubernetes_job())


def rendered(*words: str, **sections: Any) -> Said:
    return render("kubernetes", joined(BASE, **sections), *words)


def objects(**sections: Any) -> list[Any]:
    """The objects of a job that is accepted: a ConfigMap, others, and the job's own."""
    said = rendered(**sections)
    assert said.code == 0, said.err
    return objects_of(said.out)


def refused(**sections: Any) -> str:
    """Why the job has no manifest."""
    code, manifest, why = rendered(**sections)
    assert (code, manifest) == (2, "")
    return why


def pods(**sections: Any) -> tuple[Any, Any]:
    """The specs of the launcher's and of a worker's pod."""
    specs = objects(**sections)[-1]["spec"]["mpiReplicaSpecs"]
    return specs["Launcher"]["template"]["spec"], specs["Worker"]["template"]["spec"]


def variables(pod: Any) -> dict[str, Any]:
    env = pod["containers"][0]["env"]
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in env}


def pod_specs(value: Any) -> Iterator[dict[str, Any]]:
    """Every pod's spec in a document."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from pod_specs(inner)
    if isinstance(value, dict) and "containers" in value:
        yield value


@pytest.mark.parametrize("case", CASES)
def test_golden_manifest(case: str, golden: Callable[[str, str], None], tmp_path: Path) -> None:
    """Keys that built the image have no meaning in a pod, so that its job has none of them."""
    job = kubernetes_job(**CASES[case])
    (tmp_path / "job.toml").write_text(tomli_w.dumps(own_keys(job)), encoding="utf-8")
    manifest = render("kubernetes", own_keys(job)).out
    golden(f"kubernetes/{case}.yaml", manifest)
    found = objects_of(manifest)
    (tmp_path / "job.toml").write_text(found[0]["data"]["job.toml"], encoding="utf-8")
    assert load_job(tmp_path / "job.toml") == job.model_copy(
        update={"image": type(job.image)(tag=job.image.tag)}
    )
    specs = [] if "trainjob" in case else list(pod_specs(found))
    assert specs or "trainjob" in case
    for spec in specs:
        containers = [*spec["containers"], *spec.get("initContainers", [])]
        mounted = {mount["name"] for each in containers for mount in each.get("volumeMounts", [])}
        assert mounted <= {volume["name"] for volume in spec.get("volumes", [])}


# Warnings


ON_NODES = {"patch": {"worker": {"spec": {"hostNetwork": True}}}}
NETWORKS = {"k8s.v1.cni.cncf.io/networks": "rail-0"}
BRACES = {"mounts": {"/scratch": "pvc:a", "/b": "pvc:b"}}
LOCKED = "LimitMEMLOCK=infinity"


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({}, []),
        # Kubernetes leaves a capability that it adds to another user than root without effect.
        ({"kubernetes": {"rdma": {"rdma/hca": 1}}}, [LOCKED]),
        ({"kubernetes": {"rdma": {"rdma/hca": 1}, "run_as_user": 0}}, []),
        ({"resources": {"fabric": "ib"}, "kubernetes": {"rdma": {"rdma/hca": 1}, "run_as_user": 0}}, []),
        ({"kubernetes": {"worker_annotations": NETWORKS}}, []),
        ({"kubernetes": {"annotations": NETWORKS}}, ["networks belong in worker_annotations"]),
        # No policy selects pods on the nodes' network: their connections come from the node's address.
        ({"kubernetes": ON_NODES}, ["kubernetes.network_policy = false accepts this"]),
        ({"kubernetes": {**ON_NODES, "network_policy": False}}, []),
        ({"data": {"train": ["/{scratch,b}/x.tar"]}, "kubernetes": BRACES}, []),
        (
            {"data": {"train": ["/{scratch,c}/x.tar"]}, "kubernetes": BRACES},
            ["/{scratch,c}/x.tar is on no volume of [kubernetes.mounts]: the image must contain it"],
        ),
        (
            {"data": {"train": ["/elsewhere/x.tar"]}, "kubernetes": {"grace_s": 5, "rdma": {"rdma/hca": 1}}},
            ["kubernetes.grace_s = 5 is less than", "IPC_LOCK", "/elsewhere/x.tar is on no volume"],
        ),
    ],
    ids=str,
)
def test_seldom_meant_settings_are_warned_of(sections: dict[str, Any], told: list[str]) -> None:
    said = rendered(**sections)
    lines = said.err.splitlines()
    assert len(lines) == len(told)
    assert all(text in line for text, line in zip(told, lines, strict=True))
    own = sections.get("kubernetes", {})
    assert ("IPC_LOCK" in said.out) is (own.get("run_as_user") == 0)
    assert ("NetworkPolicy" in said.out) is ("patch" not in own)


def test_jobs_on_the_nodes_network_do_not_share_ports() -> None:
    """sshd of the node has 22, and another job's pods may be on the same node."""
    ports = set()
    for name in ("a", "b", "c"):
        worker = pods(name=name, kubernetes=ON_NODES)[1]
        found = variables(worker)
        ports |= {int(found["MASTER_PORT"]), int(found["CLIPSHIP_SUPERVISORS"].split(":")[1])}
        ports.add(worker["containers"][0]["ports"][0]["containerPort"])
    assert len(ports) == 9


# The patch


def test_a_patch_merges_as_kubectl_does() -> None:
    """Members by name, other lists as a whole, `$patch` deletes and replaces."""
    base = {"a": {"b": 1, "c": 2}, "tolerations": [{"key": "x"}]}
    assert merged(base, {"a": {"$patch": "replace", "d": 3}, "tolerations": ({"key": "y"},)}, "patch") == {
        "a": {"d": 3},
        "tolerations": [{"key": "y"}],
    }
    assert merged(base, {"a": {"$patch": "delete"}}, "patch") == {"tolerations": [{"key": "x"}]}
    named = {"env": [{"name": "A", "value": "1"}]}
    assert merged(named, {"env": ({"$patch": "replace"}, {"name": "B"})}, "patch") == {"env": [{"name": "B"}]}
    assert merged({}, {"env": ({"name": "A", "$patch": "delete"}, {"name": "B"})}, "patch") == {
        "env": [{"name": "B"}]
    }


GRACE, ENV = "terminationGracePeriodSeconds", {"name": "worker", "env": "A=1"}


@pytest.mark.parametrize(
    ("role", "change", "problem"),
    [
        ("worker", {"spec": {"containers": 3}}, "containers is a list in the manifest, but a single value"),
        ("worker", {"spec": {"volumes": {"name": "a"}}}, "volumes is a list in the manifest, but a table in"),
        ("worker", {"spec": {"volumes": ["a"]}}, "volumes: 'a' must be a table with the key name, which id"),
        ("worker", {"spec": "x"}, "patch.worker.spec is a table in the manifest, but a single value"),
        ("worker", {"spec": {GRACE: ["9"]}}, f"worker.spec.{GRACE} is a single value in the manifest, but a"),
        ("worker", {"spec": {"containers": [ENV]}}, "spec.containers[worker].env is a list in the manifest"),
        ("job", {"kind": "Job"}, "kubernetes.patch.job.kind: only"),
        ("job", {"metadata": {"name": "b"}}, "kubernetes.patch.job.metadata.name: only"),
        # Ranks would find the variables of Kubernetes' pause process, or of the node's init.
        *(
            (role, {"spec": {name: True}}, f"patch.{role}.spec.{name} = true: ranks read their variab")
            for role in ("launcher", "worker")
            for name in ("shareProcessNamespace", "hostPID")
        ),
    ],
)
def test_a_patch_that_makes_no_pod_or_another_object_is_refused_with_its_key(
    role: str, change: dict[str, Any], problem: str
) -> None:
    assert problem in refused(kubernetes={"patch": {role: change}})
    if problem.endswith("variab"):
        [name] = change["spec"]
        objects(kubernetes={"patch": {role: {"spec": {name: False}}}})


# Names


def test_every_job_has_names_of_its_own_that_are_dns_labels() -> None:
    names = ("first-run", "First Run", "8-gpus", "日本", "x" * 54, "x" * 100, "x" * 101, "a b", "a_b", "a  b")
    found = [objects(name=name)[-1]["metadata"]["name"] for name in names]
    assert found[0] == "first-run"
    assert len(set(found)) == len(names)
    assert not [name for name in found if not re.fullmatch(r"[a-z][a-z0-9-]{0,53}(?<!-)", name)]


# Values

_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
_KEY = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=150)
"""PyYAML reads no simple key beyond 1,024 characters, and some take ten with their escape."""


@settings(deadline=None)
@given(
    st.dictionaries(_KEY, st.one_of(_TEXT, st.integers(), st.booleans(), st.none(), st.lists(_TEXT))), _TEXT
)
def test_every_mapping_and_text_is_read_back_from_yaml(value: dict[str, object], text: str) -> None:
    assert yaml.safe_load(quoted(value)) == value
    assert yaml.safe_load(f"a: {quoted(text)}") == {"a": text}
    assert yaml.safe_load(f"a: {yaml_block(text, 2)}\nb: 1") == {"a": text, "b": 1}
    for number in (1e-05, 1e16, 1.5e-300, 0.1, -2e22):
        assert yaml.safe_load(quoted(number)) == number


def test_texts_of_a_patched_manifest_are_quoted_for_readers_that_take_them_for_others() -> None:
    for text in ("1e-4", "1E5", "0o17", "y", "n", "12:30:00", "plain"):
        patch = {"worker": {"metadata": {"labels": {text: text}}}}
        manifest = rendered(env={"NOTE": text}, kubernetes={"patch": patch}).out
        lines = [line.strip() for line in manifest.splitlines()]
        key = text if text == "plain" else f'"{text}"'
        assert f'{key}: "{text}"' in lines
        assert f'value: "{text}"' in lines


@settings(max_examples=20, deadline=None)
@given(_TEXT)
def test_hostile_values_reach_pods_as_data(text: str) -> None:
    for patch in ({}, {"worker": {"spec": {"hostname": text}}}):  # which writes the manifest anew
        keys = {"annotations": {"note": text}, "patch": patch}
        config_map, *_, mpijob = objects(env={"NOTE": text}, kubernetes=keys)
        worker = mpijob["spec"]["mpiReplicaSpecs"]["Worker"]["template"]
        assert variables(worker["spec"])["NOTE"].replace("$$", "$") == text
        assert worker["metadata"]["annotations"] == mpijob["metadata"]["annotations"] == {"note": text}
        assert config_map["data"].keys() == {"job.toml"}
        assert not patch or worker["spec"]["hostname"] == text


# What cannot work


GLOO = {"backend": "horovod", "horovod": {"cpu_operations": "gloo"}}
PIPED = {"train": ["-"], "stream_samples": 64}
MANY = {"resources": {"nodes": 7000, "gpus_per_node": 1}, "optim": {"global_batch_size": 7000}}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"data": PIPED}, "pods have no standard input"),
        ({"stage": [{"data": PIPED}]}, "data.train = - of stage 2: pods have no standard input"),
        ({"stage": [{"optim": {"global_batch_size": 7}}]}, "stage 2: optim.global_batch_size = 7 cannot be"),
        ({"image": {"tag": None}}, "image.tag is missing"),
        ({"kubernetes": {"mounts": {}}}, "is on no volume that the pods share"),
        (
            {"kubernetes": {"mounts": {}}, "logging": {"runs": "/far/runs"}},
            'section [kubernetes.mounts] with the line "/far/runs" = "pvc:CLAIM", where',
        ),
        ({"kubernetes": {"mounts": {"/scratch": "pvc:a:ro"}}}, "mounted read-only"),
        *(
            ({"kubernetes": {"mounts": {"/scratch": volume}}}, "is on no volume that the pods share")
            for volume in ("empty:20Gi", "secret:a", "configmap:a")
        ),
        ({"logging": {"runs": "/scratch/../runs"}}, "is on no volume"),
        ({"comm": {"launcher": "clipship"}}, "use auto or mpirun"),
        ({"comm": GLOO}, "cpu_operations = gloo cannot be with MPIJobs"),
        ({"kubernetes": {"name": "a" * 60}}, "use at most 54"),
        ({"kubernetes": {"name": "a" * 50, "kind": "trainjob"}}, "use at most 44"),
        (MANY, "a ConfigMap holds at most 1,048,576"),
        ({"kubernetes": {"cpu_request": 99.0}}, "above the worker's 32 cores"),
        ({"kubernetes": {"shm_gb": 999.0}}, "above the worker's 240 GiB"),
        ({"kubernetes": {"mem_request_gb": 999.0}}, "limit of 240 GiB"),
        ({"env": {"A": "1"}, "kubernetes": {"env": {"A": "secret:a:b"}}}, "A: set in both [env] and"),
        ({"kubernetes": {"env": {"MASTER_ADDR": "secret:a:b"}}}, "MASTER_ADDR: the launcher sets these"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_what_cannot_work_is_refused_before_anything_is_submitted(
    sections: dict[str, Any], expected: str
) -> None:
    assert expected in refused(**sections)


MPI = {**HOROVOD, "horovod": {"cpu_operations": "mpi"}}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"comm": MPI},
            "comm.horovod.cpu_operations = mpi cannot be with Jobs, where each pod starts its own",
        ),
        ({"comm": {"launcher": "mpirun"}}, "each pod starts its own; use auto or clipship"),
        ({"kubernetes": {"launcher_start": "at-once"}}, "kubernetes.launcher_start: Jobs have no use for it"),
        (
            {"kubernetes": {"patch": {"launcher": {"spec": {"nodeName": "a"}}}}},
            "patch.launcher: Jobs have no use for it: leave it out, or set kubernetes.kind = ",
        ),
        ({"kubernetes": {**TOPOLOGY, "pack_by": "kubernetes.io/hostname"}}, "leave these out, or topology"),
        ({"kubernetes": {**TOPOLOGY, "spread_by": "kubernetes.io/hostname"}}, "leave these out, or topology"),
    ],
)
def test_what_an_indexed_job_cannot_do_is_refused_with_the_fix(
    sections: dict[str, Any], expected: str
) -> None:
    assert expected in refused(
        **{**sections, "kubernetes": {"kind": "job", **sections.get("kubernetes", {})}}
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("namespace", "Team", "not a namespace"),
        ("name", "1st", "cannot be the name of a Kubernetes object"),
        ("gpu_resource", "gpu", "names with a domain"),
        ("tolerations", ["a b"], "is not a toleration"),
        ("mounts", {"data": "pvc:x"}, "absolute path"),
        ("mounts", {"/a/../b": "pvc:x"}, "absolute path"),
        ("mounts", {"/data": "x"}, "pvc:CLAIM"),
        ("mounts", {"/data": "pvc:X y"}, "pvc:CLAIM/FOLDER"),
        ("mounts", {"/data": "host:/a/../etc"}, "host:/FOLDER"),
        ("mounts", {"/data": "nfs:/export"}, "nfs:SERVER:/FOLDER"),
        *(
            ("mounts", {"/scratch": "pvc:scratch", "/x": text}, "is not a volume for /x: write pvc:CLAIM")
            for text in ("empty:much", "secret:a/b/c", "csi:A B", "configmap:a/b c")
        ),
        ("mounts", {"/dev/shm": "pvc:x"}, "is in use in every pod"),
        ("mounts", {"/opt": "pvc:x"}, "/opt would hide the image's /opt/clipship: mount the"),
        ("mounts", {"/proc/x": "pvc:x"}, "/proc/x would hide the image's /proc"),
        ("env", {"A": "wandb"}, "secret:NAME:KEY"),
        ("labels", {"a b": "c"}, "DOMAIN/NAME"),
        ("labels", {"a": "b c"}, "a label's value"),
        ("labels", {"training.kubeflow.org/x": "c"}, "set by the operator"),
        ("labels", {"app.kubernetes.io/name": "mine"}, "set by clipship, which knows its own objects"),
        ("priority_class", "High Class", "RFC 1123"),
        ("pack_by", "a b", "DOMAIN/NAME"),
        ("queue", "A", "LocalQueue"),
        ("gang_queue", "a", 'gang = "volcano"'),
        ("gang_timeout_s", 3, "scheduler-plugins"),
        ("topology", "rack", "set queue, or use pack_by instead"),
        ("launcher_start", "now", "workers-ready"),
        ("patch", {"pod": {}}, "unknown key"),
        ("patch", {"worker": {"metdata": {}}}, "metdata: a pod has `metadata` and `spec` alone"),
        ("backoff_limit", 2**31, "at most 10,000"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(key: str, value: object, expected: str) -> None:
    why = refused(kubernetes={key: value})
    assert f"kubernetes{'' if key.startswith(('gang', 'topology')) else '.' + key}" in why
    assert expected in why


def test_a_job_larger_than_its_config_map_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "mine.json"
    config.write_text(f'{{"x": "{"a" * 200_000}"}}')
    model = {"name": str(config)}
    room = 1024 * 1024 - sum(len(text.encode()) for text in objects(model=model)[0]["data"].values())
    why = refused(model=model, env={"NOTE": "\u00e9" * (room // 2)})
    assert re.search(r"takes 1,04\d,\d+ bytes, but a ConfigMap holds at most 1,048,576: name", why)


# Files that travel


def test_a_models_own_config_travels_with_the_job(tmp_path: Path) -> None:
    """The pods have it at the path that the job names, so that the run's keys are the same everywhere."""
    config = '{"embed_dim": 8}\n'
    path = tmp_path / "mine.json"
    path.write_text(config)
    model = {"name": str(path)}
    data = objects(model=model)[0]["data"]
    assert data["model.json"] == config
    assert f"name = {json.dumps(str(path))}" in data["job.toml"]
    mount = {"name": "job", "mountPath": str(path), "subPath": "model.json", "readOnly": True}
    assert all(mount in pod["containers"][0]["volumeMounts"] for pod in pods(model=model))
    assert "mine.json" not in rendered(model=model).err
    mounts = {str(tmp_path): "pvc:x", "/scratch": "pvc:d"}
    assert "model.json" not in objects(model=model, kubernetes={"mounts": mounts})[0]["data"], "on a volume"
    path.unlink()
    assert "model.json" not in objects(model=model)[0]["data"]
    assert "mine.json is on no volume of [kubernetes.mounts]: the image must" in rendered(model=model).err
    os.mkfifo(path)
    assert "model.json" not in objects(model=model)[0]["data"]
