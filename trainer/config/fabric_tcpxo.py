"""Row of GPUDirect-TCPXO, the network of A3 Mega on Google Kubernetes Engine. Pure; imports no torch."""

from trainer.config.fabric_row import Fabric, Line, NcclRange, Sidecar

_TCPXO = (
    "Google, GPUDirect-TCPXO release notes of Jan 9, 2026 "
    "(github.com/GoogleCloudPlatform/container-engine-accelerators, gpudirect-tcpxo/README.md)"
)
_TCPXO_POD = (
    "Google, nccl-test-latest.yaml (github.com/GoogleCloudPlatform/container-engine-accelerators, "
    "gpudirect-tcpxo)"
)
_TCPXO_LIBRARIES = "/usr/local/nvidia/lib64"
_READY = "/run/health-check"
_TCPXO_DEVICES = "".join(
    f"- path: /dev/{name}\n"
    for name in (*(f"nvidia{gpu}" for gpu in range(8)), "nvidiactl", "nvidia-uvm", "dmabuf_import_helper")
)


def _tcpxo(name: str, value: str, why: str) -> Line:
    return Line(name, value, why, _TCPXO)


TCPXO = Fabric(
    name="tcpxo",
    title="GPUDirect-TCPXO of GKE (A3 Mega)",
    rdma=False,
    host_network=Line(
        "kubernetes.host_network",
        "not needed",
        "the pod has the GPU networks as interfaces of its own",
        _TCPXO_POD,
    ),
    refused={
        "slurm": "its plugin and its service are known here for pods of Google Kubernetes Engine only: "
        "use [kubernetes], or leave resources.fabric out and set the variables in [env]"
    },
    annotations=(
        Line(
            "devices.gke.io/container.tcpxo-daemon",
            _TCPXO_DEVICES,
            "the service gets the GPUs without being privileged and without taking them from the ranks",
            _TCPXO_POD,
        ),
        Line("networking.gke.io/default-interface", "eth0", "the pod's usual network", _TCPXO_POD),
    ),
    asked_annotations=(
        Line(
            "networking.gke.io/interfaces",
            '[{"interfaceName":"eth0","network":"default"},{"interfaceName":"eth1","network":"vpc1"},...]',
            "eth1 to eth8 are the GPU networks, whose names the cluster chooses",
            _TCPXO_POD,
        ),
    ),
    folders=(
        Line(
            "/home/kubernetes/bin/nvidia/lib64",
            _TCPXO_LIBRARIES,
            "the installer leaves the plugin, its tuner and its NCCL there",
            _TCPXO_POD,
        ),
        Line("/dev/aperture_devices", "/dev/aperture_devices", "the plugin's devices", _TCPXO_POD),
    ),
    sidecar=Sidecar(
        name="tcpxo-daemon",
        image="us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.21",
        command=(
            "/bin/sh",
            "-c",
            (
                "chmod 755 /fts/entrypoint_rxdm_container.sh && "
                "exec /fts/entrypoint_rxdm_container.sh --num_hops=2"
            ),
        ),
        variables={"LD_LIBRARY_PATH": _TCPXO_LIBRARIES, "HEALTH_CHECK_LOG_FILE": _READY},
        capabilities=("NET_ADMIN", "NET_BIND_SERVICE"),
        folders={
            "/home/kubernetes/bin/nvidia/lib64": _TCPXO_LIBRARIES,
            "/sys": "/hostsysfs",
            "/proc/sys": "/hostprocsysfs",
        },
        ready_file=_READY,
        why="the service that moves the data: it is in the pod's network, is ready before the ranks start, "
        "and ends with them; --num_nics, which older recipes have, does nothing since v1.0.20",
        source=f"{_TCPXO}, and best-practice.md beside it",
    ),
    platform=Line(
        "image.platform",
        "linux/amd64",
        "the nodes of A3 Mega have x86 processors",
        "Google, Accelerator-optimized machine family "
        "(docs.cloud.google.com/compute/docs/accelerator-optimized-machines)",
    ),
    nccl=NcclRange("2.28", "2.28", "the plugin is qualified for NCCL 2.28.7", _TCPXO),
    variables=(
        Line(
            "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY",
            "/dev/aperture_devices",
            "the folder of the plugin's devices, which is mounted there",
            _TCPXO_POD,
        ),
        _tcpxo("NCCL_FASTRAK_CTRL_DEV", "eth0", "interface of the plugin's control messages"),
        _tcpxo(
            "NCCL_FASTRAK_IFNAME",
            "eth1,eth2,eth3,eth4,eth5,eth6,eth7,eth8",
            "interfaces of the eight GPU networks",
        ),
        _tcpxo("NCCL_SOCKET_IFNAME", "eth0", "interface of NCCL's own start"),
        *(
            _tcpxo(name, value, "the release was tuned with it, and checks NCCL's settings at the start")
            for name, value in (
                ("NCCL_CROSS_NIC", "0"),
                ("NCCL_PROTO", "Simple,LL128"),
                ("NCCL_MIN_NCHANNELS", "4"),
                ("NCCL_NVLSTREE_MAX_CHUNKSIZE", "131072"),
                ("NCCL_P2P_NET_CHUNKSIZE", "524288"),
                ("NCCL_P2P_PCI_CHUNKSIZE", "524288"),
                ("NCCL_P2P_NVL_CHUNKSIZE", "1048576"),
                ("NCCL_FASTRAK_NUM_FLOWS", "2"),
                ("NCCL_FASTRAK_USE_SNAP", "1"),
                ("NCCL_FASTRAK_PLUGIN_ACCEPT_TIMEOUT_MS", "600000"),
                ("NCCL_FASTRAK_ENABLE_CONTROL_CHANNEL", "0"),
                ("NCCL_BUFFSIZE", "8388608"),
                ("NCCL_NET_GDR_LEVEL", "PIX"),
                ("NCCL_FASTRAK_ENABLE_HOTPATH_LOGGING", "0"),
                ("NCCL_FASTRAK_USE_LLCM", "1"),
                ("NCCL_NVLS_ENABLE", "1"),
            )
        ),
        _tcpxo("NCCL_TUNER_PLUGIN", "libnccl-tuner.so", "chooses algorithms for this network"),
        _tcpxo(
            "NCCL_TUNER_CONFIG_PATH",
            f"{_TCPXO_LIBRARIES}/a3plus_tuner_config.textproto",
            "the tuner's table",
        ),
        _tcpxo(
            "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE",
            f"{_TCPXO_LIBRARIES}/a3plus_guest_config.textproto",
            "settings that the plugin compares at its start",
        ),
    ),
    image=(
        Line(
            "LD_LIBRARY_PATH",
            f"ends in {_TCPXO_LIBRARIES}, as in each image that Clipship builds",
            "NCCL finds the plugin and its tuner there; the torch of a wheel still uses the wheel's NCCL, "
            "whose folder it names (DT_RPATH), but the torch of a base gets the node's",
            "ld.so(8); Google's own recipe sets the variable to this folder alone",
        ),
        Line(
            "glibc",
            "2.35 or newer",
            "the plugin is built against it (Debian 12, Ubuntu 22.04)",
            "Google, GPUDirect-TCPXO release notes of May 1, 2025 "
            "(github.com/GoogleCloudPlatform/container-engine-accelerators, gpudirect-tcpxo/README.md)",
        ),
    ),
)
