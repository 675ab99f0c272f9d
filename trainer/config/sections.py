"""Sections of the job file that belong to a scheduler, by its name."""

from trainer.config.kubernetes import Kubernetes
from trainer.config.slurm import Slurm
from trainer.config.types import SchedulerSection

SECTIONS: dict[str, type[SchedulerSection]] = {"slurm": Slurm, "kubernetes": Kubernetes}
"""Their keys. A section that is added before `trainer.config.job` is imported is served like the others."""
