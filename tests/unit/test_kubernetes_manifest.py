"""The manifests: their whole text, what its values become, what it refuses.

tests/cluster/kubernetes has a real cluster.
"""

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

from tests.support.kubernetes_jobs import CASES, HOROVOD, kubernetes_job, objects_of
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


def pods(job: Job) -> tuple[Any, Any]:
    """The specs of the launcher's and of a worker's pod."""
    specs = documents(job)[1]["spec"]["mpiReplicaSpecs"]
    return specs["Launcher"]["template"]["spec"], specs["Worker"]["template"]["spec"]


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
def test_the_config_map_holds_the_job_that_was_rendered(case: str, tmp_path: Path) -> None:
    """Keys that built the image have no meaning in a pod."""
    job = kubernetes_job(**CASES[case])
    (tmp_path / "job.toml").write_text(documents(job)[0]["data"]["job.toml"], encoding="utf-8")
    assert load_job(tmp_path / "job.toml") == job.model_copy(update={"image": Image(tag=job.image.tag)})


# The traps


@pytest.mark.parametrize(
    "asked", [{"kubernetes": {"rdma": {"rdma/hca": 1}}}, {"resources": {"fabric": "ib"}}], ids=["rdma", "ib"]
)
def test_root_may_lock_memory_for_rdma_and_others_are_told_that_they_may_not(asked: dict[str, Any]) -> None:
    """Kubernetes leaves a capability that it adds to another user without effect."""
    assert any("LimitMEMLOCK=infinity" in text for text in warnings(kubernetes_job(**asked)))
    root = kubernetes_job(**{**asked, "kubernetes": {**asked.get("kubernetes", {}), "run_as_user": 0}})
    assert "IPC_LOCK" in manifest(root)
    assert not any("LimitMEMLOCK" in text for text in warnings(root))


def test_networks_of_the_workers_that_reach_the_launcher_are_named() -> None:
    networks = {"k8s.v1.cni.cncf.io/networks": "rail-0"}
    assert not list(warnings(kubernetes_job(kubernetes={"worker_annotations": networks})))
    (warning,) = warnings(kubernetes_job(kubernetes={"annotations": networks}))
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


def test_a_policy_does_not_keep_workers_on_the_nodes_network_from_their_launcher() -> None:
    """No policy selects such pods, and their connections to the launcher come from the node's address."""
    job = kubernetes_job(kubernetes=ON_NODES)
    assert "NetworkPolicy" not in manifest(job)
    assert "kubernetes.network_policy = false accepts this" in "".join(warnings(job))
    assert not list(warnings(kubernetes_job(kubernetes={**ON_NODES, "network_policy": False})))


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


@pytest.mark.parametrize(
    ("change", "named"),
    [({"kind": "Job"}, "job.kind"), ({"metadata": {"name": "b"}}, "job.metadata.name")],
)
def test_a_patch_does_not_make_another_object(change: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"kubernetes.patch.{named}: only")):
        manifest(kubernetes_job(kubernetes={"patch": {"job": change}}))


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


# What cannot work


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
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
    with pytest.raises(InputError, match=re.escape(expected)):
        manifest(kubernetes_job(**sections))


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
        ("namespace", "a" * 64, "not a namespace"),
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
