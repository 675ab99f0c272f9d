"""Steps of a model whose images have other numbers of patches in each (model.image_tokens). No torch."""

from collections.abc import Iterator
from dataclasses import replace

from trainer.config import Job
from trainer.config.batch_plan import BatchPlan, passes
from trainer.estimate.architecture import Architecture


def drawn_steps(
    shape: Architecture, job: Job, plan: BatchPlan
) -> Iterator[tuple[float, Architecture, BatchPlan]]:
    """Yields each kind of step: its share of the steps, the model as it is then, and how the batch passes."""
    budgets = job.model.token_budgets
    if len(budgets) <= 1:
        yield 1.0, shape, plan
        return
    weights = job.model.image_tokens_weights or (1.0,) * len(budgets)
    patch = shape.image_size[1]
    for tokens, weight in zip(budgets, weights, strict=True):
        parts = passes(job, plan, tokens)
        yield (
            weight / sum(weights),
            replace(shape, image=replace(shape.image, tokens=tokens), image_size=(tokens * patch, patch)),
            replace(plan, micro_batch_size=plan.batch_size_per_rank // parts, accumulation=parts),
        )
