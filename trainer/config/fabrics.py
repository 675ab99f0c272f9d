"""Table of the networks between nodes: what a run must set, mount and have in its image to use each one.

A network is one row here; no other module compares a name. Every line has its reason and a public document
that says so. Rates for estimates are in `trainer.config.fabric_rates`. Pure; imports no torch.
"""

from trainer.config.fabric_row import Fabric, Line, NcclRange
from trainer.config.fabric_tcpxo import TCPXO

_OPERATOR = "NVIDIA, Kubernetes RDMA shared device plugin (github.com/Mellanox/k8s-rdma-shared-dev-plugin)"
_AKS = "Azure, AKS RDMA over InfiniBand (github.com/Azure/aks-rdma-infiniband, tests/scenarios/k8s)"
_ROCE = "NVIDIA, RDMA over Converged Ethernet, GID Table Population (docs.nvidia.com/networking)"
_NCCL = "NCCL user guide, Environment Variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)"
_NCCL_2_21 = 'NCCL 2.21.5-1, "Net/IB: add support for dynamic GID detection" (github.com/NVIDIA/nccl)'
_OFI = "aws-ofi-nccl, release notes of v1.21.1 (github.com/aws/aws-ofi-nccl)"
_OFI_NAME = "aws-ofi-nccl, src/nccl_ofi_interface_nvidia.cpp of v1.20.0 (github.com/aws/aws-ofi-nccl)"
_OFI_VARIABLES = "aws-ofi-nccl, doc/efa-env-var.md (github.com/aws/aws-ofi-nccl)"
_LIBFABRIC = "libfabric, list of its variables (`fi_info -e`)"
_EKS = "Amazon EKS user guide, Manage EFA devices (docs.aws.amazon.com/eks, device-management-efa)"
_EKS_JOBS = (
    "AWS, jobs on EKS (github.com/awslabs/awsome-distributed-ai, 3.test_cases/pytorch/FSDP/kubernetes)"
)
_VERBS = "Linux, Documentation/infiniband/user_verbs.rst"

_PINNED = (
    Line(
        "memlock",
        "unlimited",
        "an adapter reads and writes memory that must not move, and a limit makes NCCL fail to register it; "
        "on Slurm the script raises the limit or says that it cannot",
        _VERBS,
    ),
    Line(
        "IPC_LOCK",
        "for root (kubernetes.run_as_user = 0)",
        "on Kubernetes this capability lifts the limit, and root alone gets it; for another user the nodes' "
        "container runtime must not limit locked memory (LimitMEMLOCK=infinity)",
        "NVIDIA Container Toolkit, issue 2037 (github.com/NVIDIA/nvidia-container-toolkit)",
    ),
)
_VERBS_LIBRARY = Line(
    "libibverbs",
    "with the adapter's provider (rdma-core)",
    "NCCL loads it at its start, and without it sees no adapter",
    _VERBS,
)
_SHARED_ADAPTERS = Line(
    "kubernetes.rdma",
    "rdma/NAME",
    "the settings of the cluster's device plugin choose the name; a container without it sees no adapter",
    _OPERATOR,
)
_NET_IB = Line(
    "NCCL_NET",
    "IB",
    "NCCL's own transport for InfiniBand and RoCE; a run that cannot use it fails at its start instead of "
    "going on over TCP",
    _NCCL,
)

_ROWS = (
    Fabric(
        name="ib",
        title="InfiniBand",
        rdma=True,
        host_network=Line(
            "kubernetes.host_network",
            "not needed",
            "the adapters have addresses of their own, which do not depend on the pod's network",
            _AKS,
        ),
        device=_SHARED_ADAPTERS,
        variables=(_NET_IB,),
        memory=_PINNED,
        image=(_VERBS_LIBRARY,),
    ),
    Fabric(
        name="roce",
        title="RoCE v2: RDMA over Ethernet",
        rdma=True,
        host_network=Line(
            "kubernetes.host_network",
            "true, unless worker_annotations names a network",
            "an adapter's addresses are those of its network interface, so a pod needs this interface or "
            "one of its own (macvlan, SR-IOV)",
            _ROCE,
        ),
        needs_interface=True,
        device=_SHARED_ADAPTERS,
        nccl=NcclRange(
            "2.21",
            "",
            "since then NCCL finds the index of the RoCE v2 address itself, without NCCL_IB_GID_INDEX",
            _NCCL_2_21,
        ),
        variables=(_NET_IB,),
        memory=_PINNED,
        image=(_VERBS_LIBRARY,),
    ),
    Fabric(
        name="efa",
        title="Elastic Fabric Adapter of AWS",
        rdma=True,
        host_network=Line(
            "kubernetes.host_network",
            "not needed",
            "the device plugin gives the adapter to the pod, and the ranks need no interface of it",
            _EKS_JOBS,
        ),
        device=Line(
            "kubernetes.rdma",
            "vpc.amazonaws.com/efa",
            "the device plugin's name; the number of adapters depends on the instance type",
            _EKS,
        ),
        nccl=NcclRange("2.17.1", "", "the oldest release that aws-ofi-nccl 1.20 and 1.21 work with", _OFI),
        variables=(
            Line(
                "NCCL_NET",
                "AWS Libfabric",
                "the plugin's name, under which each of its versions answers; a run that cannot use it fails "
                "at its start instead of going on over TCP",
                _OFI_NAME,
            ),
            Line(
                "FI_PROVIDER",
                "efa",
                "libfabric then offers no other provider, so the plugin cannot choose TCP",
                _LIBFABRIC,
            ),
            Line(
                "FI_EFA_USE_HUGE_PAGE",
                "0",
                "the loader processes are forked, and a fork fails when the system has no huge pages left",
                _OFI_VARIABLES,
            ),
        ),
        memory=_PINNED,
        image=(
            Line(
                "aws-ofi-nccl", "1.7 or newer", "the plugin through which NCCL uses libfabric", _OFI_VARIABLES
            ),
            Line("libfabric", "1.22 or newer, with the provider efa", "the plugin is built on it", _OFI),
        ),
    ),
    TCPXO,
    Fabric(
        name="ethernet",
        title="Ethernet with TCP",
        rdma=False,
        host_network=Line(
            "kubernetes.host_network",
            "not needed",
            "NCCL takes the pod's usual interface; the nodes' network would spare the overlay between pods",
            _NCCL,
        ),
        variables=(
            Line(
                "NCCL_NET",
                "Socket",
                "NCCL's own transport for TCP, also where a node has adapters or a plugin that fail",
                _NCCL,
            ),
        ),
    ),
)

FABRICS: dict[str, Fabric] = {row.name: row for row in _ROWS}
"""Rows by name."""
