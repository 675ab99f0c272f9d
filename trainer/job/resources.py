"""`[resources]`: what a job asks of a cluster, whichever scheduler it has."""

from trainer.job.fields import AboveZero, Positive, Section


class Resources(Section):
    """What the job asks of a cluster. `clipship run` takes --nproc or --hosts instead."""

    nodes: Positive = 1
    gpus_per_node: Positive = 1
    cpus_per_gpu: Positive = 8
    mem_gb_per_gpu: AboveZero | None = None

    @property
    def world_size(self) -> int:
        """Ranks: one for each GPU."""
        return self.nodes * self.gpus_per_node
