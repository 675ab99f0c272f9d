"""Jobs for tests of the manifests: one for each thing that a manifest can say."""

from typing import Any

import yaml

from trainer.config import Job
from trainer.config.loader import job_from_table

HOSTILE = "a #b \"c\" 'd': {{ x }} $(HOME) $$ `id` - \\n\té\u2028\u0085\U0001f600; yes"
"""Not for names that Kubernetes restricts."""
HOROVOD = {"backend": "horovod"}

EVERYTHING: dict[str, Any] = {
    "namespace": "team-a",
    "name": "clip-1",
    "run_as_user": 4242,
    "gpu_resource": "amd.com/gpu",
    "rdma": {"rdma/hca_shared_devices": 2},
    "cpu_request": 2.5,
    "cpu_limit": False,
    "mem_request_gb": 10,
    "shm_gb": 12.5,
    "node_selector": {"node.kubernetes.io/instance-type": "p5.48xlarge", "disk": "yes"},
    "tolerations": ["nvidia.com/gpu:NoSchedule", "dedicated=clip", "*"],
    "pack_by": "topology.kubernetes.io/zone",
    "spread_by": "kubernetes.io/hostname",
    "placement": "required",
    "priority_class": "high",
    "labels": {"team": "vision", "example.com/cost-centre": "0123"},
    "annotations": {"example.com/note": HOSTILE, "example.com/tier": "all"},
    "worker_annotations": {"k8s.v1.cni.cncf.io/networks": "rail-0,rail-1", "example.com/tier": "workers"},
    "mounts": {
        "/data": "pvc:clip-data/cc3m:ro",
        "/scratch": "host:/mnt/scratch",
        "/home/shared": "nfs:filer.example:/export/home",
    },
    "env": {"WANDB_API_KEY": "secret:wandb:api-key", "HTTPS_PROXY": "configmap:site:proxy"},
    "queue": "gpu-queue",
    "gang": "volcano",
    "gang_queue": "research",
    "launcher_start": "at-once",
    "workers_ready_s": 60.0,
    "retries": 1,
    "backoff_limit": 0,
    "grace_s": 45,
    "deadline_s": 86400,
}

VOLUMES = {
    "/scratch": "pvc:scratch",
    "/bucket": "csi:gcsfuse.csi.storage.gke.io?bucketName=clip&mountOptions=implicit-dirs,uid%3D1000:ro",
    "/etc/key.json": "secret:gcp/key.json",
    "/etc/site": "configmap:site",
    "/ssd": "empty:200Gi",
    "/ram": "empty:memory:1.5Gi",
    "/plain": "empty",
    "/tmp": "host:/ssd/tmp",
}
WITHOUT_LAUNCHER = {key: value for key, value in EVERYTHING.items() if key != "launcher_start"}
TOPOLOGY = {"queue": "gpu-queue", "topology": "cloud.provider.com/topology-rack"}
RECOVERY = {"max_restarts": 3, "spare_nodes": 1}
FABRIC_KEYS: dict[str, dict[str, Any]] = {
    "ib": {"rdma": {"rdma/hca_shared_devices": 1}},
    "roce": {"rdma": {"rdma/roce": 8}},
    "efa": {"rdma": {"vpc.amazonaws.com/efa": 32}},
    "tcpxo": {
        "worker_annotations": {
            "networking.gke.io/interfaces": '[{"interfaceName":"eth0","network":"default"}]'
        }
    },
    "ethernet": {},
}
"""Keys of [kubernetes] that each network wants."""
FABRIC_STACKS = {"tcpxo": {"torch": "2.11.0"}}
"""Stacks for networks that the default one does not fit."""

CASES: dict[str, dict[str, Any]] = {
    "job": {"kubernetes": {"kind": None}},
    "job-recovery": {
        "resources": {"accelerator": "rocm"},
        "recovery": RECOVERY,
        "kubernetes": {"kind": "job"},
    },
    "job-open": {
        "resources": {"device": "cpu", "cpus_per_gpu": 12},
        "kubernetes": {
            "kind": "job",
            "read_only_root": False,
            "network_policy": False,
            "launcher_start": "workers-ready",
        },
    },
    "job-ascend": {"resources": {"accelerator": "ascend"}, "kubernetes": {"kind": "job", "run_as_user": 0}},
    "job-everything": {
        "env": {"NOTE": HOSTILE},
        "recovery": {**RECOVERY, "min_nodes": 1},
        "kubernetes": {**WITHOUT_LAUNCHER, "kind": "job"},
    },
    "trainjob": {"kubernetes": {"kind": "trainjob"}},
    "trainjob-everything": {
        "env": {"NOTE": HOSTILE},
        "recovery": RECOVERY,
        "kubernetes": {**WITHOUT_LAUNCHER, "kind": "trainjob"},
    },
    "job-patched": {
        "kubernetes": {"kind": "job", "patch": {"worker": {"spec": {"runtimeClassName": "nvidia"}}}}
    },
    **{
        f"{kind}-patched-both-and-job": {
            "kubernetes": {
                "kind": kind,
                "patch": {
                    "both": {"spec": {"runtimeClassName": "nvidia"}},
                    "worker": {"spec": {"hostAliases": [{"ip": "10.0.0.9", "hostnames": ["filer"]}]}},
                    "job": {"metadata": {"labels": {"team": "a"}}, "spec": {"suspend": True}},
                },
            }
        }
        for kind in ("job", "trainjob")
    },
    "torch": {},
    "horovod": {"comm": HOROVOD, "kubernetes": {"mounts": {"/scratch": "nfs:filer:/scratch"}}},
    "volumes": {
        "kubernetes": {
            "mounts": VOLUMES,
            "patch": {
                "both": {"spec": {"runtimeClassName": "nvidia"}},
                "launcher": {
                    "spec": {
                        "nodeSelector": {"pool": "cpu"},
                        "hostAliases": [{"ip": "10.0.0.9", "hostnames": ["filer"]}],
                    }
                },
                "worker": {"spec": {"runtimeClassName": "in-place-of-the-other"}},
                "job": {"metadata": {"labels": {"team": "a"}}},
            },
        }
    },
    "root": {"kubernetes": {"run_as_user": 0}},
    "cpu": {"resources": {"mem_gb_per_gpu": 0.5}, "kubernetes": {"gpu_resource": "none", "cpu_request": 0.1}},
    "rdma": {"kubernetes": {"rdma": {"rdma/hca_shared_devices": 1}, "run_as_user": 0}},
    "kueue": {"resources": {"gpus_per_node": 0}, "kubernetes": {"queue": "gpu-queue"}},
    **{
        f"{kind}-topology": {"kubernetes": {**TOPOLOGY, "kind": kind, "placement": placement}}
        for kind, placement in (("job", "required"), ("trainjob", "preferred"), ("mpijob", "required"))
    },
    "scheduler-plugins": {
        "kubernetes": {
            "gang": "scheduler-plugins",
            "gang_timeout_s": 300,
            "spread_by": "kubernetes.io/hostname",
        }
    },
    **{
        f"{kind}-scheduler-plugins": {
            "kubernetes": {"kind": kind, "gang": "scheduler-plugins", "gang_timeout_s": 300}
        }
        for kind in ("job", "trainjob")
    },
    "everything": {"comm": HOROVOD, "env": {"NOTE": HOSTILE}, "kubernetes": EVERYTHING},
    "hostile": {
        "name": HOSTILE.replace("\t", "").replace("\u2028", "").replace("\u0085", ""),
        "env": {"NOTE": HOSTILE},
    },
    "patched": {
        "kubernetes": {
            "patch": {
                "worker": {
                    "metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "rail-0"}},
                    "spec": {
                        "runtimeClassName": "nvidia",
                        "containers": [
                            {
                                "name": "worker",
                                "env": [
                                    {"name": "OMP_NUM_THREADS", "value": "3"},
                                    {"name": "NEW", "value": "1"},
                                ],
                                "volumeMounts": [
                                    {"mountPath": "/dev/shm", "$patch": "delete"},
                                    {"name": "ssd", "mountPath": "/ssd"},
                                ],
                            }
                        ],
                        "volumes": [{"name": "shm", "$patch": "delete"}, {"name": "ssd", "emptyDir": {}}],
                    },
                }
            }
        }
    },
    **{
        f"fabric-{name}-job": {
            "resources": {"fabric": name},
            **({"stack": FABRIC_STACKS[name]} if name in FABRIC_STACKS else {}),
            "kubernetes": {"kind": "job", **keys},
        }
        for name, keys in FABRIC_KEYS.items()
    },
    "arm64": {"image": {"platform": "linux/arm64"}, "kubernetes": {"node_selector": {"pool": "gh200"}}},
    "thousand": {"resources": {"nodes": 1000, "gpus_per_node": 8}, "optim": {"global_batch_size": 32000}},
}


def kubernetes_job(**sections: Any) -> Job:
    """An MPIJob of two workers of four GPUs; keys of a section replace the ones here."""
    table: dict[str, Any] = {
        "name": "first-run",
        "data": {"train": ["/scratch/cc3m/{00000..00331}.tar"]},
        "optim": {"global_batch_size": 4096, "epochs": 3},
        "image": {"tag": "registry.example/ml/clipship:1"},
        "resources": {"nodes": 2, "gpus_per_node": 4, "mem_gb_per_gpu": 60},
        "logging": {"runs": "/scratch/runs"},
        "kubernetes": {"kind": "mpijob", "mounts": {"/scratch": "pvc:scratch"}},
    }
    for name, value in sections.items():
        table[name] = {**table.get(name, {}), **value} if isinstance(value, dict) else value
    return job_from_table(table, "a test's job")


def objects_of(text: str) -> list[Any]:
    """Returns the objects of a manifest, read by libyaml where PyYAML has it: that is seven times as fast."""
    return list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
