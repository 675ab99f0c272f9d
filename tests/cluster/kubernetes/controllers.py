"""Table of the projects whose controllers and schedulers the tests run beside the cluster of KUBECONFIG."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.cluster.kubernetes.crds import Crd as Kind
from tests.cluster.kubernetes.programs import HOST, Program, Programs
from trainer.launch.kubernetes.gangs import GANGS


def _configuration(**own: Any) -> Callable[[int], Kind]:
    """Returns the settings of a controller of controller-runtime, with some of its own."""
    return lambda port: {
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": "0"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": HOST, "port": port, "certDir": "."},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        **own,
    }


KUEUE = Programs(
    name="Kueue",
    module="sigs.k8s.io/kueue",
    version="v0.17.0",
    programs=(
        Program(
            "kueue",
            "cmd/kueue",
            changes={
                # A certificate that it wants in a fixed place.
                "/etc/kueue/metrics/certs": ".",
                # An API server that was built from its source says no version.
                'return nil, fmt.Errorf("failed to fetch kubernetes server version: %w", err)': (
                    'setupLog.Error(err, "The API server says no version")'
                ),
            },
        ),
    ),
    kinds="config/components/crd/bases",
    webhooks="config/components/webhook/manifests.yaml",
    group="kueue.x-k8s.io",
    served=("kueue.x-k8s.io", "batch", "kubeflow.org", "trainer.kubeflow.org"),
    settings=_configuration(
        apiVersion="config.kueue.x-k8s.io/v1beta2",
        namespace="kube-system",  # in its own, Kueue starts no jobs
        integrations={"frameworks": ["batch/job", "kubeflow.org/mpijob", "trainer.kubeflow.org/trainjob"]},
        featureGates={"VisibilityOnDemand": False},
    ),
)
JOBSET = Programs(
    name="JobSet",
    module="sigs.k8s.io/jobset",
    version="v0.8.0",
    programs=(Program("jobset", "."),),
    kinds="config/components/crd/bases",
    webhooks="config/components/webhook/manifests.yaml",
    group="jobset.x-k8s.io",
    served=("jobset.x-k8s.io", ""),
    settings=_configuration(apiVersion="config.jobset.x-k8s.io/v1alpha1"),
)
TRAINER = Programs(
    name="Kubeflow Trainer",
    module="github.com/kubeflow/trainer/v2",
    version="v2.0.0",
    programs=(
        Program(
            "trainer",
            "cmd/trainer-controller-manager",
            ("--webhook-server-port={port}", "--health-probe-bind-address=0"),
            changes={
                # It has no flag for another certificate than one that it makes for a Service of its own.
                "cert.ManageCerts(mgr, cert.Config{": (
                    "func(_ cert.Config, ready chan struct{}) error { close(ready); return nil }(cert.Config{"
                ),
                "Port:    webhookServerPort,": f'Host: "{HOST}", Port: webhookServerPort, CertDir: ".",',
            },
        ),
    ),
    kinds="manifests/base/crds",
    webhooks="manifests/base/webhook/manifests.yaml",
    group="trainer.kubeflow.org",
    served=("trainer.kubeflow.org",),
)
JOBSET_0_11 = replace(JOBSET, version="v0.11.1")
TRAINER_2_2 = replace(
    TRAINER,
    version="v2.2.0",
    programs=(Program("trainer", "cmd/trainer-controller-manager"),),
    settings=lambda port: {
        "apiVersion": "config.trainer.kubeflow.org/v1alpha1",
        "kind": "Configuration",
        "webhook": {"host": HOST, "port": port},
        "health": {"healthProbeBindAddress": "0"},
        "metrics": {"bindAddress": "0"},
        "leaderElection": {"leaderElect": False},
        "certManagement": {"enable": False},
    },
)
"""Kueue v0.17 knows TrainJobs as they are from Kubeflow Trainer v2.2 on, which JobSet v0.11 belongs to."""
_OF_VOLCANO = (
    "--kubeconfig={kubeconfig}",
    "--leader-elect=false",
    "--enable-healthz",
    f"--healthz-address={HOST}:{{port}}",
)
VOLCANO = Programs(
    name="Volcano",
    checkout="VOLCANO_SOURCE",
    version="v1.15.1",
    programs=(
        Program(
            "volcano-controllers",
            "cmd/controller-manager",
            (*_OF_VOLCANO, "--controllers=+job-controller,+pg-controller,+queue-controller,+gc-controller"),
        ),
        Program("volcano-scheduler", "cmd/scheduler", (*_OF_VOLCANO, "--cache-dumper=false")),
    ),
    kinds="config/crd/volcano/bases",
    group="batch.volcano.sh",
)
PLUGINS = Programs(
    name="the scheduler-plugins",
    module="sigs.k8s.io/scheduler-plugins",
    version="v0.33.5",
    programs=(
        Program(
            "scheduler-plugins-scheduler",
            "cmd/scheduler",
            (
                "--config=config.yaml",
                f"--bind-address={HOST}",
                "--secure-port={port}",
                "--tls-cert-file=tls.crt",
                "--tls-private-key-file=tls.key",
            ),
        ),
        Program(
            "scheduler-plugins-controller",
            "cmd/controller",
            ("--metricsAddr=0", f"--probeAddr={HOST}:{{port}}"),
        ),
    ),
    kinds="config/crd/bases",
    group="scheduling.x-k8s.io",
    settings=lambda _port: {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": os.environ["KUBECONFIG"]},
        "profiles": [
            {
                "schedulerName": GANGS["scheduler-plugins"].scheduler,
                "plugins": {
                    "multiPoint": {"enabled": [{"name": "Coscheduling"}]},
                    "queueSort": {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "*"}]},
                },
            }
        ],
    },
)
