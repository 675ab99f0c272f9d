"""Finds the blocks that a tower repeats: layers of a transformer or of a ConvNet stage."""

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""torch's batch norms; others, such as timm's, are subclasses."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the members of the innermost containers of several composite modules of one kind."""
    stacks = [module for module in model.modules() if _repeats(module)]
    return [
        block
        for stack in stacks
        if not any(inner is not stack and _repeats(inner) for inner in stack.modules())
        for block in stack.children()
    ]


def _repeats(module: nn.Module) -> bool:
    kinds = {type(child) for child in module.children()}
    composite = all(any(True for _ in child.children()) for child in module.children())
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) > 1
        and len(kinds) == 1
        and composite
    )
