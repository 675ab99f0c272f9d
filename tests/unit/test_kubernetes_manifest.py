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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.kubernetes_jobs import CASES, EVERYTHING, HOROVOD, HOSTILE, kubernetes_job, objects_of
from trainer.cli.main import main
from trainer.config import Image, Job, Kubernetes
from trainer.config.kubernetes import object_name
from trainer.config.loader import dump_job, load_job, own_keys
from trainer.errors import InputError
from trainer.launch.kubernetes.manifest import manifest
from trainer.launch.kubernetes.patch import merged
from trainer.launch.kubernetes.places import carried
from trainer.launch.kubernetes.validate import hosts_bytes, warnings
from trainer.text.yaml_text import yaml as quoted
from trainer.text.yaml_text import yaml_block

Golden = Callable[[str, str], None]


def documents(job: Job) -> tuple[Any, Any]:
    """The ConfigMap and the job's own object."""
    config_map, *_, own = objects_of(manifest(job))
    return config_map, own


def policy(job: Job) -> Any:
    """The NetworkPolicy of the manifest, or None."""
    return next(
        (document for document in objects_of(manifest(job)) if document["kind"] == "NetworkPolicy"),
        None,
    )


def pods(job: Job) -> tuple[Any, Any]:
    """The specs of the launcher's and of a worker's pod."""
    specs = documents(job)[1]["spec"]["mpiReplicaSpecs"]
    return specs["Launcher"]["template"]["spec"], specs["Worker"]["template"]["spec"]


def mount_paths(pod: Any) -> list[str]:
    return [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]


def variables(pod: Any) -> dict[str, Any]:
    return {
        entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in pod["containers"][0]["env"]
    }


@pytest.mark.parametrize("case", CASES)
def test_golden_manifest(case: str, golden: Golden) -> None:
    golden(f"kubernetes/{case}.yaml", manifest(kubernetes_job(**CASES[case])))


def pod_specs(value: Any) -> Iterator[dict[str, Any]]:
    """Every pod's spec in a document."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from pod_specs(inner)
    if isinstance(value, dict) and "containers" in value:
        yield value


@pytest.mark.parametrize("case", [case for case in CASES if "trainjob" not in case])
def test_what_a_container_mounts_is_a_volume_of_its_pod(case: str) -> None:
    specs = list(pod_specs(objects_of(manifest(kubernetes_job(**CASES[case])))))
    assert specs
    for spec in specs:
        containers = [*spec["containers"], *spec.get("initContainers", [])]
        mounted = {mount["name"] for each in containers for mount in each.get("volumeMounts", [])}
        assert mounted <= {volume["name"] for volume in spec.get("volumes", [])}


@pytest.mark.parametrize("case", CASES)
def test_the_same_job_renders_the_same_bytes(case: str) -> None:
    assert manifest(kubernetes_job(**CASES[case])) == manifest(kubernetes_job(**CASES[case]))


@pytest.mark.parametrize("case", CASES)
def test_the_config_map_holds_the_job_that_was_rendered(case: str, tmp_path: Path) -> None:
    """Keys that built the image have no meaning in a pod."""
    job = kubernetes_job(**CASES[case])
    (tmp_path / "job.toml").write_text(documents(job)[0]["data"]["job.toml"], encoding="utf-8")
    assert load_job(tmp_path / "job.toml") == job.model_copy(update={"image": Image(tag=job.image.tag)})


@pytest.mark.parametrize("resources", [{"device": "cpu"}, {"gpus_per_node": 0}])
def test_workers_of_a_job_that_means_the_cpu_ask_for_no_gpu(resources: dict[str, Any]) -> None:
    assert "nvidia.com/gpu" not in str(
        pods(kubernetes_job(resources=resources))[1]["containers"][0]["resources"]
    )


# The traps


def test_open_mpi_5_finds_the_operators_hostfile() -> None:
    """The operator sets only OMPI_MCA_orte_default_hostfile, which Open MPI 5 ignores.

    Without a variable for Open MPI 5, every rank would run in the launcher.
    """
    found = variables(pods(kubernetes_job())[0])
    assert found["PRTE_MCA_prte_default_hostfile"] == "/etc/mpi/hostfile"
    assert found["PRTE_MCA_prte_keep_fqdn_hostnames"] == "1"


def test_ssh_fans_out_alike_in_both_open_mpis() -> None:
    found = variables(pods(kubernetes_job(**CASES["thousand"]))[0])
    assert found["OMPI_MCA_plm_rsh_num_concurrent"] == found["PRTE_MCA_plm_ssh_num_concurrent"] == "128"
    assert found["OMPI_MCA_plm_rsh_no_tree_spawn"] == found["PRTE_MCA_plm_ssh_no_tree_spawn"] == "1"


def test_every_rank_is_told_the_world_size_that_was_asked_for() -> None:
    assert variables(pods(kubernetes_job())[1])["CLIPSHIP_WORLD_SIZE"] == "8"


def test_secrets_are_references_and_stand_on_no_command_line() -> None:
    job = kubernetes_job(kubernetes=EVERYTHING)
    launcher, worker = pods(job)
    assert variables(worker)["WANDB_API_KEY"] == {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
    assert "CLIPSHIP_TOKEN" not in manifest(job)
    for pod in (launcher, worker):
        assert not any("wandb" in word for word in pod["containers"][0]["command"])


def test_the_launcher_waits_for_workers_whose_sshd_answers() -> None:
    spec = documents(kubernetes_job())[1]["spec"]
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    container = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert (
        container["readinessProbe"]["tcpSocket"] == container["startupProbe"]["tcpSocket"] == {"port": 2222}
    )
    assert container["command"][-1] == "2222"


@pytest.mark.parametrize(
    ("user", "folder", "port"),
    [(0, "/root/.ssh", 22), (1000, "/home/clipship/.ssh", 2222), (4242, "/home/clipship/.ssh", 2222)],
)
def test_the_ssh_key_lies_where_ssh_takes_it_from_this_user(user: int, folder: str, port: int) -> None:
    job = kubernetes_job(kubernetes={"run_as_user": user})
    assert documents(job)[1]["spec"]["sshAuthMountPath"] == folder
    assert pods(job)[1]["containers"][0]["ports"] == [{"name": "ssh", "containerPort": port}]


def test_a_user_that_the_image_does_not_know_gets_an_entry() -> None:
    config_map, _ = documents(kubernetes_job(kubernetes={"run_as_user": 4242}))
    assert "clipship:x:4242:4242::/home/clipship:/bin/bash\n" in config_map["data"]["passwd"]
    assert "passwd" not in documents(kubernetes_job())[0]["data"]


def test_dev_shm_is_memory_of_a_given_size() -> None:
    volume = next(volume for volume in pods(kubernetes_job())[1]["volumes"] if volume["name"] == "shm")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_dev_shm_is_no_larger_than_the_memory_that_it_counts_as() -> None:
    small = {"nodes": 2, "gpus_per_node": 4, "mem_gb_per_gpu": 0.5}
    pod = pods(kubernetes_job(resources=small))[1]
    volume = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert volume["emptyDir"]["sizeLimit"] == pod["containers"][0]["resources"]["limits"]["memory"] == "2Gi"


def test_workers_go_at_the_end_and_the_launchers_log_stays() -> None:
    spec = documents(kubernetes_job())[1]["spec"]
    assert spec["runPolicy"]["cleanPodPolicy"] == "Running"
    assert spec["mpiReplicaSpecs"]["Launcher"]["restartPolicy"] == "Never"


def test_workers_are_restarted_in_their_pods_for_the_operator_makes_no_new_ones() -> None:
    assert documents(kubernetes_job())[1]["spec"]["mpiReplicaSpecs"]["Worker"]["restartPolicy"] == "OnFailure"


def test_the_launcher_asks_for_no_gpu() -> None:
    launcher, worker = pods(kubernetes_job())
    assert "nvidia.com/gpu" not in json.dumps(launcher)
    assert worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_a_gang_does_not_wait_for_the_launcher_that_waits_for_the_gang() -> None:
    """The operator's default, workers + 1, never starts with WaitForWorkersReady."""
    spec = documents(kubernetes_job(kubernetes={"gang": "volcano"}))[1]["spec"]
    assert spec["runPolicy"]["schedulingPolicy"]["minAvailable"] == 2
    at_once = documents(kubernetes_job(kubernetes={"gang": "volcano", "launcher_start": "at-once"}))[1][
        "spec"
    ]
    assert at_once["runPolicy"]["schedulingPolicy"]["minAvailable"] == 3


@pytest.mark.parametrize(
    "asked", [{"kubernetes": {"rdma": {"rdma/hca": 1}}}, {"resources": {"fabric": "ib"}}], ids=["rdma", "ib"]
)
def test_root_may_lock_memory_for_rdma_and_others_are_told_that_they_may_not(asked: dict[str, Any]) -> None:
    """Kubernetes leaves a capability that it adds to another user without effect."""
    assert "IPC_LOCK" not in manifest(kubernetes_job(kubernetes={"run_as_user": 0}))
    assert "IPC_LOCK" not in manifest(kubernetes_job(**asked))
    assert any("LimitMEMLOCK=infinity" in text for text in warnings(kubernetes_job(**asked)))
    root = kubernetes_job(**{**asked, "kubernetes": {**asked.get("kubernetes", {}), "run_as_user": 0}})
    added = pods(root)[1]["containers"][0]["securityContext"]["capabilities"]["add"]
    assert {"IPC_LOCK", "SYS_CHROOT"} <= set(added)
    assert not any("LimitMEMLOCK" in text for text in warnings(root))


@pytest.mark.parametrize("user", [0, 1000, 4242])
def test_containers_gain_no_rights_and_write_only_into_volumes(user: int) -> None:
    launcher, worker = pods(kubernetes_job(kubernetes={"run_as_user": user}))
    home = "/root" if user == 0 else "/home/clipship"
    for pod in (launcher, worker):
        security = pod["containers"][0]["securityContext"]
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
        assert security["capabilities"]["drop"] == ["ALL"]
        empty = {volume["name"] for volume in pod["volumes"] if volume.get("emptyDir") == {}}
        mounted = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert {mounted["/tmp"], mounted[home]} <= empty
    added = worker["containers"][0]["securityContext"]["capabilities"].get("add", [])
    assert ("SYS_CHROOT" in added) == (user == 0)
    assert not {"NET_RAW", "MKNOD", "SETPCAP", "SYS_ADMIN"} & set(added)
    assert "SYS_CHROOT" not in launcher["containers"][0]["securityContext"]["capabilities"].get("add", [])


def test_a_jobs_own_volume_takes_the_place_of_an_empty_one() -> None:
    mounts = {"/scratch": "pvc:scratch", "/tmp": "host:/ssd/tmp"}
    worker = pods(kubernetes_job(kubernetes={"mounts": mounts}))[1]
    assert sorted(path for path in mount_paths(worker) if path in ("/tmp", "/home/clipship")) == [
        "/home/clipship",
        "/tmp",
    ]
    assert "tmp" not in [volume["name"] for volume in worker["volumes"]]


def test_a_job_may_keep_its_root_file_system_writable() -> None:
    worker = pods(kubernetes_job(kubernetes={"read_only_root": False}))[1]
    assert "readOnlyRootFilesystem" not in worker["containers"][0]["securityContext"]
    assert "/tmp" not in mount_paths(worker)


def test_no_gpu_comes_to_a_pod_that_asks_for_none() -> None:
    """The image says NVIDIA_VISIBLE_DEVICES=all, and where NVIDIA's runtime is the default it heeds that."""
    launcher, worker = pods(kubernetes_job())
    assert variables(launcher)["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert "NVIDIA_VISIBLE_DEVICES" not in variables(worker)
    for sections in ({"kubernetes": {"gpu_resource": "none"}}, {"resources": {"device": "cpu"}}):
        on_cpus = pods(kubernetes_job(**sections))[1]
        assert variables(on_cpus)["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_networks_of_the_workers_do_not_reach_the_launcher() -> None:
    job = kubernetes_job(
        kubernetes={
            "annotations": {"example.com/both": "a", "example.com/one": "a"},
            "worker_annotations": {"k8s.v1.cni.cncf.io/networks": "rail-0", "example.com/one": "c"},
        }
    )
    specs = documents(job)[1]["spec"]["mpiReplicaSpecs"]
    launcher, worker = (specs[role]["template"]["metadata"]["annotations"] for role in ("Launcher", "Worker"))
    assert launcher == {"example.com/both": "a", "example.com/one": "a"}
    assert worker == {
        "example.com/both": "a",
        "example.com/one": "c",
        "k8s.v1.cni.cncf.io/networks": "rail-0",
    }
    assert not list(warnings(job))
    (warning,) = warnings(
        kubernetes_job(kubernetes={"annotations": {"k8s.v1.cni.cncf.io/networks": "rail-0"}})
    )
    assert "also applies to the launcher; networks belong in worker_annotations" in warning


ON_NODES = {"patch": {"worker": {"spec": {"hostNetwork": True}}}}


def test_jobs_on_the_nodes_network_do_not_share_ports() -> None:
    """sshd of the node has 22, and another job's pods may be on the same node."""
    ports = set()
    for name in ("a", "b", "c"):
        worker = pods(kubernetes_job(name=name, kubernetes=ON_NODES))[1]
        found = variables(worker)
        ports |= {
            worker["containers"][0]["ports"][0]["containerPort"],
            int(found["MASTER_PORT"]),
            int(found["CLIPSHIP_SUPERVISORS"].split(":")[1]),
        }
    assert len(ports) == 9
    assert all(20_000 <= port < 29_000 for port in ports)


# Who may connect


OWN_PODS = {"podSelector": {"matchLabels": {"training.kubeflow.org/job-name": "first-run"}}}


@pytest.mark.parametrize("sections", [{}, CASES["patched"], CASES["root"]], ids=["user", "patched", "root"])
def test_only_pods_of_the_job_connect_to_its_pods_and_what_they_connect_to_is_free(
    sections: dict[str, Any],
) -> None:
    spec = policy(kubernetes_job(**sections))["spec"]
    assert spec == {**OWN_PODS, "policyTypes": ["Ingress"], "ingress": [{"from": [OWN_PODS]}]}


def test_a_job_may_do_without_a_network_policy() -> None:
    assert policy(kubernetes_job(kubernetes={"network_policy": False})) is None


def test_a_policy_does_not_keep_workers_on_the_nodes_network_from_their_launcher() -> None:
    """No policy selects such pods, and their connections to the launcher come from the node's address."""
    job = kubernetes_job(kubernetes=ON_NODES)
    assert policy(job) is None
    assert "kubernetes.network_policy = false accepts this" in "".join(warnings(job))
    assert not list(warnings(kubernetes_job(kubernetes={**ON_NODES, "network_policy": False})))


# The patch


def test_a_patch_merges_as_kubectl_does() -> None:
    """Members by name, other lists as a whole, `$patch` deletes and replaces."""
    worker = pods(kubernetes_job(**CASES["patched"]))[1]
    assert worker["runtimeClassName"] == "nvidia"
    assert variables(worker)["OMP_NUM_THREADS"] == "3"
    assert variables(worker)["NEW"] == "1"
    assert variables(worker)["CLIPSHIP_WORLD_SIZE"] == "8"
    assert [volume["name"] for volume in worker["volumes"]] == ["job", "tmp", "home", "mount-0", "ssd"]
    assert mount_paths(worker) == ["/etc/clipship", "/tmp", "/home/clipship", "/scratch", "/ssd"]
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


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"spec": {"containers": 3}},
            "worker.spec.containers is a list in the manifest, but a single value in the patch",
        ),
        (
            {"spec": {"volumes": {"name": "a"}}},
            "worker.spec.volumes is a list in the manifest, but a table in the patch",
        ),
        (
            {"spec": {"volumes": ["a"]}},
            (
                "worker.spec.volumes: 'a' must be a table with the key name, "
                "which identifies the members of this list"
            ),
        ),
        ({"spec": "x"}, "worker.spec is a table in the manifest, but a single value in the patch"),
        (
            {"spec": {"terminationGracePeriodSeconds": ["9"]}},
            (
                "worker.spec.terminationGracePeriodSeconds is a single value in the manifest, "
                "but a list in the patch"
            ),
        ),
        (
            {"spec": {"containers": [{"name": "worker", "env": "A=1"}]}},
            "worker.spec.containers[worker].env is a list in the manifest, but a single value in the patch",
        ),
    ],
)
def test_a_patch_that_makes_no_pod_is_refused_with_its_key(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError) as refused:
        manifest(kubernetes_job(kubernetes={"patch": {"worker": change}}))
    assert str(refused.value) == f"kubernetes.patch.{problem}"


@pytest.mark.parametrize("role", ["launcher", "worker"])
@pytest.mark.parametrize("name", ["shareProcessNamespace", "hostPID"])
def test_a_patch_does_not_make_another_process_the_first_one(role: str, name: str) -> None:
    """Ranks would find the variables of Kubernetes' pause process, or of the node's init."""
    with pytest.raises(
        InputError, match=rf"kubernetes.patch.{role}.spec.{name} = true: ranks read their variables"
    ):
        manifest(kubernetes_job(kubernetes={"patch": {role: {"spec": {name: True}}}}))
    manifest(kubernetes_job(kubernetes={"patch": {role: {"spec": {name: False}}}}))


def test_a_patch_of_both_reaches_every_template_and_that_of_one_comes_last() -> None:
    patch = {
        "both": {"spec": {"runtimeClassName": "a", "dnsPolicy": "None"}},
        "worker": {"spec": {"runtimeClassName": "b"}},
    }
    launcher, worker = pods(kubernetes_job(kubernetes={"patch": patch}))
    assert (launcher["runtimeClassName"], worker["runtimeClassName"]) == ("a", "b")
    assert launcher["dnsPolicy"] == worker["dnsPolicy"] == "None"


@pytest.mark.parametrize("kind", ["mpijob", "job", "trainjob"])
def test_a_patch_of_the_job_reaches_its_own_object(kind: str) -> None:
    patch = {
        "job": {"metadata": {"labels": {"team": "a"}}, "spec": {"managedBy": "kueue.x-k8s.io/multikueue"}}
    }
    own = documents(kubernetes_job(kubernetes={"kind": kind, "patch": patch}))[1]
    assert own["metadata"]["labels"] == {"app.kubernetes.io/name": "clipship", "team": "a"}
    assert own["spec"]["managedBy"] == "kueue.x-k8s.io/multikueue"


@pytest.mark.parametrize(
    ("change", "named"),
    [({"kind": "Job"}, "job.kind"), ({"metadata": {"name": "b"}}, "job.metadata.name")],
)
def test_a_patch_does_not_make_another_object(change: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"kubernetes.patch.{named}: only")):
        manifest(kubernetes_job(kubernetes={"patch": {"job": change}}))


def test_volumes_of_every_kind_are_mounted() -> None:
    mounts = {
        "/scratch": "pvc:scratch",
        "/bucket": "csi:gcsfuse.csi.storage.gke.io?bucketName=clip&mountOptions=implicit-dirs,uid%3D1000:ro",
        "/etc/key.json": "secret:gcp/key.json",
        "/etc/site": "configmap:site",
        "/ssd": "empty:200Gi",
        "/ram": "empty:memory:1.5Gi",
        "/plain": "empty",
    }
    worker = pods(kubernetes_job(kubernetes={"mounts": mounts}))[1]
    volumes = {volume.pop("name"): volume for volume in worker["volumes"]}
    attributes = {"bucketName": "clip", "mountOptions": "implicit-dirs,uid=1000"}
    assert [volumes[f"mount-{number}"] for number in range(1, 7)] == [
        {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": True, "volumeAttributes": attributes}},
        {"secret": {"secretName": "gcp"}},
        {"configMap": {"name": "site"}},
        {"emptyDir": {"sizeLimit": "200Gi"}},
        {"emptyDir": {"medium": "Memory", "sizeLimit": "1.5Gi"}},
        {"emptyDir": {}},
    ]
    found = {mount["mountPath"]: mount for mount in worker["containers"][0]["volumeMounts"]}
    key = {"name": "mount-2", "mountPath": "/etc/key.json", "subPath": "key.json", "readOnly": True}
    assert found["/etc/key.json"] == key
    assert found["/bucket"]["readOnly"]


@pytest.mark.parametrize(
    "text",
    ["empty:much", "secret:", "secret:a/b/c", "csi:A B", "csi:driver?name", "configmap:a/b c", "empty:disk"],
)
def test_a_volume_of_another_form_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(InputError, match="is not a volume for /x: write pvc:CLAIM"):
        kubernetes_job(kubernetes={"mounts": {"/scratch": "pvc:scratch", "/x": text}})


@pytest.mark.parametrize("text", ["empty:20Gi", "secret:a", "configmap:a"])
def test_a_run_folder_that_pods_do_not_share_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is on no volume that the pods share"):
        manifest(kubernetes_job(kubernetes={"mounts": {"/scratch": text}}))


def test_a_launcher_may_go_to_any_node() -> None:
    launcher, worker = pods(kubernetes_job(kubernetes={"node_selector": {"pool": "gpu"}}))
    assert "nodeSelector" not in launcher
    assert worker["nodeSelector"] == {"pool": "gpu"}


def test_a_patch_leaves_the_other_template_alone() -> None:
    assert pods(kubernetes_job(**CASES["patched"]))[0] == pods(kubernetes_job())[0]


# Names


@pytest.mark.parametrize(
    ("name", "workers", "expected"),
    [
        ("first-run", 2, "first-run"),
        ("First Run", 2, "first-run-a10bb1cd"),
        ("8-gpus", 2, "run-8-gpus-5a1dd8bb"),
        ("日本", 2, "run-f64a7f8d"),
        ("x" * 54, 2, "x" * 54),
    ],
)
def test_the_mpijob_is_named_after_the_job(name: str, workers: int, expected: str) -> None:
    found = object_name(name, Kubernetes(), workers)
    assert found[:-8] == expected[:-8]
    assert (found == name) == (expected == name)


@settings(deadline=None)
@given(st.text(min_size=1, max_size=200), st.integers(1, 5000))
def test_every_job_name_makes_names_that_are_dns_labels(name: str, workers: int) -> None:
    found = object_name(name, Kubernetes(), workers)
    for pod in (f"{found}-worker-{workers - 1}", f"{found}-launcher"):
        assert len(pod) <= 63
    assert found[0].isalpha()
    assert set(found) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert not found.endswith("-")


def test_different_jobs_have_different_names_whatever_is_cut_off() -> None:
    names = ["x" * 100, "x" * 101, "X" * 100, "a b", "a_b", "a  b"]
    assert len({object_name(name, Kubernetes(), 2) for name in names}) == len(names)


# Values

_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
_KEY = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=150)
"""PyYAML reads no simple key beyond 1,024 characters, and some take ten with their escape."""


@settings(deadline=None)
@given(_TEXT)
def test_every_text_is_read_back_from_yaml(text: str) -> None:
    assert yaml.safe_load(f"a: {quoted(text)}") == {"a": text}
    assert yaml.safe_load(f"a: {yaml_block(text, 2)}\nb: 1") == {"a": text, "b": 1}


@settings(deadline=None)
@given(st.dictionaries(_KEY, st.one_of(_TEXT, st.integers(), st.booleans(), st.none(), st.lists(_TEXT))))
def test_every_mapping_is_read_back_from_yaml(value: dict[str, object]) -> None:
    assert yaml.safe_load(quoted(value)) == value


@pytest.mark.parametrize("number", [1e-05, 1e16, 1.5e-300, 0.1, -2e22])
def test_every_number_is_read_back_from_yaml(number: float) -> None:
    assert yaml.safe_load(quoted(number)) == number


@pytest.mark.parametrize("text", ["1e-4", "1E5", "0o17", "y", "n", "12:30:00", "plain"])
def test_texts_of_a_patched_manifest_are_quoted_for_readers_that_take_them_for_others(text: str) -> None:
    patch = {"worker": {"metadata": {"labels": {text: text}}}}
    job = kubernetes_job(env={"NOTE": text}, kubernetes={"patch": patch})
    text_in_quotes = f'"{text}"'
    lines = [line.strip() for line in manifest(job).splitlines()]
    key = text if text == "plain" else text_in_quotes
    assert f"{key}: {text_in_quotes}" in lines
    assert f"value: {text_in_quotes}" in lines


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40, deadline=None)
@given(_TEXT)
def test_hostile_values_reach_pods_as_data(text: str) -> None:
    job = kubernetes_job(env={"NOTE": text}, kubernetes={"annotations": {"note": text}})
    _read_back(job, text)
    patch = {"worker": {"spec": {"hostname": text}}}  # which writes the manifest anew
    worker = _read_back(
        kubernetes_job(env={"NOTE": text}, kubernetes={"annotations": {"note": text}, "patch": patch}), text
    )
    assert worker["spec"]["hostname"] == text


def _read_back(job: Job, text: str) -> Any:
    """The worker's template, where the text has arrived as it is."""
    config_map, mpijob = documents(job)
    worker = mpijob["spec"]["mpiReplicaSpecs"]["Worker"]["template"]
    assert variables(worker["spec"])["NOTE"].replace("$$", "$") == text
    assert worker["metadata"]["annotations"] == mpijob["metadata"]["annotations"] == {"note": text}
    assert config_map["data"].keys() == {"job.toml"}
    return worker


def test_kubernetes_expands_no_variable_within_a_value() -> None:
    """It reads $(NAME) in values, and $$ for $."""
    assert variables(pods(kubernetes_job(env={"NOTE": "$(HOME) $$ $"}))[1])["NOTE"] == "$$(HOME) $$$$ $$"


# What cannot work


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"image": {"tag": None}}, "image.tag is missing"),
        ({"data": {"train": ("-",), "stream_samples": 64}}, "pods have no standard input"),
        (
            {"stage": ({"data": {"train": ("-",), "stream_samples": 64}},)},
            "data.train = - of stage 2: pods have no standard input",
        ),
        (
            {"stage": ({"optim": {"global_batch_size": 7}},)},
            "stage 2: optim.global_batch_size = 7 cannot be shared equally by 8 ranks",
        ),
        ({"kubernetes": {"mounts": {}}}, "is on no volume that the pods share"),
        (
            {"kubernetes": {"mounts": {}}, "logging": {"runs": "/far/runs"}},
            'section [kubernetes.mounts] with the line "/far/runs" = "pvc:CLAIM", where',
        ),
        ({"kubernetes": {"mounts": {"/scratch": "pvc:a:ro"}}}, "mounted read-only"),
        ({"logging": {"runs": "/scratch/../runs"}}, "is on no volume"),
        ({"comm": {"launcher": "clipship"}}, "use auto or mpirun"),
        (
            {
                "comm": {"backend": "horovod", "horovod": {"cpu_operations": "gloo"}},
                "kubernetes": {"kind": "mpijob", "mounts": {"/scratch": "pvc:a"}},
            },
            "cpu_operations = gloo cannot be with MPIJobs",
        ),
        ({"kubernetes": {"name": "a" * 60, "mounts": {"/scratch": "pvc:a"}}}, "use at most 54"),
        (
            {"kubernetes": {"name": "a" * 50, "kind": "trainjob", "mounts": {"/scratch": "pvc:a"}}},
            "use at most 44",
        ),
        (
            {"resources": {"nodes": 7000, "gpus_per_node": 1}, "optim": {"global_batch_size": 7000}},
            "a ConfigMap holds at most 1,048,576",
        ),
        ({"optim": {"global_batch_size": 4097}}, "cannot be shared equally by 8 ranks"),
        (
            {"kubernetes": {"cpu_request": 99.0, "mounts": {"/scratch": "pvc:a"}}},
            "above the worker's 32 cores",
        ),
        ({"kubernetes": {"shm_gb": 999.0, "mounts": {"/scratch": "pvc:a"}}}, "above the worker's 240 GiB"),
        ({"kubernetes": {"mem_request_gb": 999.0, "mounts": {"/scratch": "pvc:a"}}}, "limit of 240 GiB"),
        (
            {"env": {"A": "1"}, "kubernetes": {"env": {"A": "secret:a:b"}, "mounts": {"/scratch": "pvc:a"}}},
            "A: set in both [env] and",
        ),
        (
            {"kubernetes": {"env": {"CLIPSHIP_TOKEN": "secret:a:b"}, "mounts": {"/scratch": "pvc:a"}}},
            "CLIPSHIP_TOKEN: the launcher sets these",
        ),
        (
            {"kubernetes": {"env": {"MASTER_ADDR": "secret:a:b"}, "mounts": {"/scratch": "pvc:a"}}},
            "MASTER_ADDR: the launcher sets these",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_submitted(
    sections: dict[str, Any], expected: str
) -> None:
    job = kubernetes_job(**{key: value for key, value in sections.items() if value != {"tag": None}})
    if sections.get("image"):
        job = job.model_copy(update={"image": job.image.model_copy(update={"tag": None})})
    with pytest.raises(
        InputError, match="(?s)" + expected.replace("[", r"\[").replace(".", r"\.").replace("(", r"\(")
    ):
        manifest(job)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(InputError) as refused:
        manifest(
            kubernetes_job(
                comm={"launcher": "clipship"}, kubernetes={"mounts": {}}, optim={"global_batch_size": 3}
            )
        )
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("namespace", "Team", "not a namespace"),
        ("name", "1st", "cannot be the name of a Kubernetes object"),
        ("run_as_user", -1, "at least 0"),
        ("gpu_resource", "gpu", "names with a domain"),
        ("rdma", {"hca": 1}, "names with a domain"),
        ("tolerations", ["a b"], "is not a toleration"),
        ("tolerations", ["a:Never"], "is not a toleration"),
        ("mounts", {"data": "pvc:x"}, "absolute path"),
        ("mounts", {"/a/../b": "pvc:x"}, "absolute path"),
        ("mounts", {"/data": "x"}, "pvc:CLAIM"),
        ("mounts", {"/data": "pvc:X y"}, "pvc:CLAIM/FOLDER"),
        ("mounts", {"/data": "host:relative"}, "host:/FOLDER"),
        ("mounts", {"/data": "host:/a/../etc"}, "host:/FOLDER"),
        ("mounts", {"/data": "nfs:/export"}, "nfs:SERVER:/FOLDER"),
        ("mounts", {"/dev/shm": "pvc:x"}, "is in use in every pod"),
        (
            "mounts",
            {"/opt": "pvc:x"},
            "/opt would hide the image's /opt/clipship: mount the",
        ),
        ("mounts", {"/etc": "pvc:x"}, "/etc would hide the image's /etc"),
        ("mounts", {"/proc/x": "pvc:x"}, "/proc/x would hide the image's /proc"),
        ("env", {"A": "wandb"}, "secret:NAME:KEY"),
        ("env", {"A": "secret:wandb"}, "secret:NAME:KEY"),
        ("labels", {"a b": "c"}, "DOMAIN/NAME"),
        ("labels", {"a": "b c"}, "a label's value"),
        ("labels", {"training.kubeflow.org/x": "c"}, "set by the operator"),
        ("node_selector", {"a": "b c"}, "a label's value"),
        ("priority_class", "High Class", "RFC 1123"),
        ("pack_by", "a b", "DOMAIN/NAME"),
        ("queue", "A", "LocalQueue"),
        ("gang_queue", "a", 'gang = "volcano"'),
        ("gang_timeout_s", 3, "scheduler-plugins"),
        ("topology", "rack", "set queue, or use pack_by instead"),
        ("launcher_start", "now", "workers-ready"),
        ("patch", {"pod": {}}, "unknown key"),
        ("patch", {"worker": {"metdata": {}}}, "metdata: a pod has `metadata` and `spec` alone"),
        ("labels", {"app.kubernetes.io/name": "mine"}, "set by clipship, which knows its own objects"),
        ("retries", -1, "at least 0"),
        ("backoff_limit", 2**31, "at most 10,000"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(key: str, value: object, expected: str) -> None:
    with pytest.raises(InputError) as refused:
        kubernetes_job(kubernetes={key: value})
    assert f"kubernetes{'' if key.startswith(('gang', 'topology')) else '.' + key}" in str(refused.value)
    assert expected in str(refused.value)


@pytest.mark.parametrize(("train", "outside"), [("/{scratch,b}/x.tar", False), ("/{scratch,c}/x.tar", True)])
def test_a_pattern_is_on_volumes_if_all_that_its_braces_name_is(train: str, outside: bool) -> None:
    mounts = {"/scratch": "pvc:a", "/b": "pvc:b"}
    job = kubernetes_job(data={"train": [train]}, kubernetes={"mounts": mounts})
    assert any(text.startswith(f"{train} is on no volume") for text in warnings(job)) == outside


def test_seldom_meant_settings_are_warned_of() -> None:
    job = kubernetes_job(
        data={"train": ["/elsewhere/x.tar"]},
        kubernetes={"grace_s": 5, "rdma": {"rdma/hca": 1}, "mounts": {"/scratch": "pvc:a"}},
    )
    found = list(warnings(job))
    assert [
        "grace_s" in found[0],
        "IPC_LOCK" in found[1],
        "/elsewhere/x.tar is on no volume" in found[2],
    ] == [True] * 3
    assert not list(warnings(kubernetes_job()))


def test_a_job_larger_than_its_config_map_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "mine.json"
    config.write_text(f'{{"x": "{"a" * 200_000}"}}')
    names = [f"/scratch/shard-{number:06}.tar" for number in range(22_000)]
    job = kubernetes_job(data={"train": names}, model={"name": str(config)})
    texts = documents(job)[0]["data"].values()
    room = 1024 * 1024 - sum(len(text.encode()) for text in texts)
    more = kubernetes_job(
        data={"train": names}, model={"name": str(config)}, env={"NOTE": "\u00e9" * (room // 2)}
    )
    with pytest.raises(
        InputError, match=r"takes 1,04\d,\d+ bytes, but a ConfigMap holds at most 1,048,576: name"
    ):
        manifest(more)


def test_the_size_of_the_operators_host_list_is_known_exactly() -> None:
    """As v0.8.2 writes it: a line of the hostfile and a line of the script for each worker."""
    job = kubernetes_job(
        resources={"nodes": 11, "gpus_per_node": 8},
        optim={"global_batch_size": 88},
        kubernetes={"namespace": "team", "mounts": {"/scratch": "pvc:a"}},
    )
    hosts = [f"first-run-worker-{i}.first-run.team.svc" for i in range(11)]
    hostfile = "".join(f"{host} slots=8\n" for host in hosts)
    script = "#!/bin/sh\n" + "".join(f"echo {host}\n" for host in hosts)
    assert hosts_bytes(job) == len(hostfile) + len(script)


# The command


def test_render_prints_the_manifest_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = kubernetes_job(comm=HOROVOD)
    (tmp_path / "job.toml").write_text(tomli_w.dumps(own_keys(job)))
    assert main(["render", "kubernetes", str(tmp_path / "job.toml")]) == 0
    assert capsys.readouterr() == (manifest(job), "")


def test_render_refuses_a_job_without_an_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text(dump_job(kubernetes_job()))
    assert main(["render", "kubernetes", str(tmp_path / "job.toml"), "--set", "image.tag="]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "image.tag is missing" in captured.err


def test_hostile_text_is_what_it_claims() -> None:
    assert {"\t", "\u2028", "\U0001f600", '"', "'", "$", "#"} <= set(HOSTILE)


def test_a_models_own_config_travels_with_the_job(tmp_path: Path) -> None:
    """The pods have it at the path that the job names, so that the run's keys are the same everywhere."""
    config = '{"embed_dim": 8}\n'
    path = tmp_path / "mine.json"
    path.write_text(config)
    job = kubernetes_job(model={"name": str(path)})
    assert documents(job)[0]["data"]["model.json"] == config
    mount = {"name": "job", "mountPath": str(path), "subPath": "model.json", "readOnly": True}
    assert all(mount in pod["containers"][0]["volumeMounts"] for pod in pods(job))
    assert f'name = "{path}"' in documents(job)[0]["data"]["job.toml"]
    assert not [text for text in warnings(job) if "mine.json" in text]
    path.unlink()
    assert "model.json" not in documents(job)[0]["data"]
    assert [text for text in warnings(job) if "the image must contain it" in text]


def test_configs_on_a_volume_and_files_that_are_none_stay_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    on_a_volume = kubernetes_job(
        model={"name": str(tmp_path / "mine.json")},
        kubernetes={"mounts": {str(tmp_path): "pvc:x", "/data": "pvc:d"}},
    )
    assert list(carried(on_a_volume)) == []
    os.mkfifo(tmp_path / "fifo.json")
    assert list(carried(kubernetes_job(model={"name": str(tmp_path / "fifo.json")}))) == []
