"""Jobs for tests of the batch script: one for each thing that a script can say."""

from typing import Any

from tests.support.command_line import Table, joined
from trainer.config.fabrics import FABRICS

HOROVOD = {"backend": "horovod"}
PYXIS = {"container": "pyxis", "image": "registry.example.com/vision/clip:1"}
HOSTILE = "a #b \"c\" 'd' %j $HOME `id` \\n;é"


def slurm_table(**sections: Any) -> Table:
    """A job of two nodes of four GPUs; keys of a section replace the ones here."""
    table: Table = {
        "name": "first-run",
        "data": {"train": ["/data/cc3m/{00000..00331}.tar"]},
        "optim": {"global_batch_size": 4096, "epochs": 3},
        "resources": {"nodes": 2, "gpus_per_node": 4},
        "logging": {"runs": "/scratch/runs"},
    }
    return joined(table, **sections)


EVERYTHING: dict[str, Any] = {
    "partition": "gpu",
    "account": "vision",
    "time": "1-12:30",
    "mem": "480G",
    "gpus": "gres",
    "nodelist": "n[1-8]",
    "exclude": "n3",
    "array": "1-10%1",
    "gres": ["nvme:1", "craynetwork:1"],
    "output": "/scratch/out/%x-%j.out",
    "retries": 2,
    "max_restarts": 5,
    "extra": {
        "licenses": "matlab:1",
        "constraint": "(ib&nvlink)",
        "mail-type": "END,FAIL",
        "exclusive": True,
        "mem-bind": "verbose,local",
        "comment": HOSTILE,
        "overcommit": False,
    },
    "srun": {
        "cpu-bind": "verbose,cores",
        "network": HOSTILE,
        "exact": True,
        "overlap": False,
        "gpus-per-task": "1",
        "container": "/bundle",  # where other options begin alike
    },
}

SPARE = {"max_restarts": 3, "spare_nodes": 1}

CASES: dict[str, dict[str, Any]] = {
    "torch-srun": {},
    "one-node": {
        "resources": {"nodes": 1, "gpus_per_node": 1},
        "slurm": {"requeue": False, "mem": "0", "time": 90},
    },
    "horovod-srun-pmi2": {
        "comm": HOROVOD,
        "slurm": {
            "mpi": "pmi2",
            "gres": ["nvme:1"],
            "modules": ["cuda/13.0"],
            "setup": ['. "$HOME/venv/bin/activate"'],
        },
    },
    "horovod-mpirun": {"comm": HOROVOD, "slurm": {"launcher": "mpirun", "python": "/shared/venv/bin/python"}},
    "torch-pyxis": {
        "slurm": PYXIS | {"mounts": ["/lustre/data:/data:ro", "/lustre/imagenet:/imagenet"]},
        "eval": {"zero_shot": ["/imagenet"], "class_names": "/imagenet/names"},
    },
    "horovod-pyxis": {
        "comm": HOROVOD,
        "slurm": PYXIS | {"image": "/images/clip.sqsh", "mounts": ["/local/ssd:/data/cc3m/ssd"]},
        "env": {"LIST": "a,b"},
    },
    "torch-pyxis-cpu": {
        "slurm": {"container": "pyxis", "image_dir": "/shared/images", "gpus": "none", "gres": ["nvme:1"]},
        "image": {"tag": PYXIS["image"]},
        "comm": {"nccl": {"socket_ifname": "=eth0"}},
    },
    "torch-apptainer": {
        "slurm": {"container": "apptainer", "image": "/images/clip.sif"},
        "env": {"LIST": "a,b"},
    },
    "rocm-apptainer": {
        "resources": {"accelerator": "rocm"},
        "slurm": {"container": "apptainer", "image": "/images/clip.sif"},
    },
    "horovod-apptainer-mpirun": {
        "comm": HOROVOD,
        "slurm": {"container": "apptainer", "launcher": "mpirun"},
        "image": {"tag": "clip:1"},
    },
    "apptainer-options": {
        "resources": {"accelerator": "ascend"},
        "slurm": {
            "container": "apptainer",
            "image": "/images/clip.sif",
            "container_binary": "/opt/singularity 4/bin/singularity",
            "container_flags": ["--fakeroot", f"--overlay={HOSTILE}"],
        },
    },
    "every-option": {
        "slurm": EVERYTHING,
        "resources": {"cpus_per_gpu": 12, "mem_gb_per_gpu": 60, "bind_cpus": False, "gpu": "A100-80GB"},
    },
    "memory": {"resources": {"mem_gb_per_gpu": 1.5}},
    "on-cpu": {"resources": {"device": "cpu"}, "slurm": PYXIS},
    "hostile": {
        "name": HOSTILE,
        "env": {"A": HOSTILE, "LINES": "one\ntwo\nEND_OF_JOB\n", "EMPTY": ""},
        "logging": {"runs": "/s/a\nb'c"},
    },
    "ipv6-interface": {
        "slurm": {"rendezvous": "ipv6", "interface": "ib0", "signal": "HUP", "signal_lead_s": 60}
    },
    "several-gpu-types": {
        "resources": {
            "gpus_per_node": 8,
            "gpu_rates": {"memory_gib": 39.0, "tflops": 240.0, "bandwidth_gb_s": 1400.0},
        },
        "slurm": {"gres": ["gpu:a100:4", "gpu:h100:4", "nvme:1"]},
    },
    "retries": {"resources": {"gpus_per_node": 0}, "slurm": {"retries": 3}},
    "name-suffix": {"resources": {"device": "cpu"}, "slurm": {"name_suffix": "i", "gpus": "gpus-per-node"}},
    "recovery": {"comm": HOROVOD, "recovery": SPARE, "slurm": {"array": "1-10%1"}},
    "recovery-mpi": {"comm": HOROVOD, "recovery": {"max_restarts": 3}, "slurm": {"launcher": "mpirun"}},
    "recovery-pyxis": {
        "recovery": SPARE,
        "slurm": PYXIS | {"mounts": ["/far:/far"]},
        "model": {"cache_dir": "/scratch/my cache"},
        "data": {"index": "/far/index"},  # which is not made: it is on a mount of the user's
    },
    "recovery-apptainer": {
        "recovery": {"max_restarts": 3},
        "slurm": {"container": "apptainer", "image": "/images/clip.sif", "requeue": False},
    },
    "fabric-efa-pyxis": {"resources": {"fabric": "efa"}, "slurm": PYXIS},
    **{
        f"fabric-{name}": {"resources": {"fabric": name}}
        for name, row in FABRICS.items()
        if "slurm" not in row.refused
    },
}
