"""Table of optimizers: a row holds all that other modules need to know about one. Imports no torch.

Every row but AdamW's is made by timm's factory. Optimizers are left out that keep, beside tensors for each
parameter, numbers which a checkpoint could not give back: LAMB and Adan count steps in their groups, Muon and
MADGRAD keep plain values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

OptimizerName = Literal["adamw", "nadamw", "adopt", "lion", "sgd", "adafactor"]
Arguments = Callable[[float, float, float], Mapping[str, Any]]


@dataclass(frozen=True)
class OptimizerRow:
    """Properties of one optimizer."""

    factory: str
    """Name by which timm's factory makes it; "" for torch's fused AdamW."""
    arguments: Arguments
    """Function from `optim.beta1`, `beta2` and `eps` to the factory's arguments."""
    reads: tuple[str, ...]
    """Those of the three keys that have an effect."""
    state_values: int
    """Values that it keeps for each trained parameter; fewer than one are left out."""
    elementwise: bool
    """True if the update of a value depends on no other value of its parameter.

    Ranks that hold rows of a parameter then compute the same as one rank with all of it.
    """
    source: str
    """Paper that defines it."""


def _betas(beta1: float, beta2: float, _eps: float) -> Mapping[str, Any]:
    return {"betas": (beta1, beta2)}


def _betas_and_eps(beta1: float, beta2: float, eps: float) -> Mapping[str, Any]:
    return {"betas": (beta1, beta2), "eps": eps}


def _momentum(beta1: float, _beta2: float, _eps: float) -> Mapping[str, Any]:
    return {"momentum": beta1}


def _factored(beta1: float, beta2: float, _eps: float) -> Mapping[str, Any]:
    # The momentum has the parameters' type: a checkpoint could not give it back in half precision.
    return {"momentum": beta1, "beta2_cap": beta2, "momentum_dtype": "float32"}


NO_DECAY_IN_OPEN_CLIP_4 = (
    "positional_embedding",
    "text.positional_embedding",
    "visual.positional_embedding",
    "text.reg_tokens",
    "text.pool.query",
    "text.*position_embeddings*",
    "text.*token_type_embeddings*",
    "text.*embed_positions*",
    "visual.trunk.*pos_embed",
    "visual.trunk.*cls_token",
    "visual.trunk.*reg_token",
)
"""Values of `optim.no_decay` with which decay spares what open_clip_train 4 spares (its optim.py)."""

OPTIMIZERS: Mapping[OptimizerName, OptimizerRow] = {
    "adamw": OptimizerRow("", _betas_and_eps, ("beta1", "beta2", "eps"), 2, True, "arXiv 1711.05101"),
    "nadamw": OptimizerRow(
        "nadamw", _betas_and_eps, ("beta1", "beta2", "eps"), 2, True, "arXiv 2306.07179, appendix C"
    ),
    "adopt": OptimizerRow("adoptw", _betas_and_eps, ("beta1", "beta2", "eps"), 2, True, "arXiv 2411.02853"),
    "lion": OptimizerRow("lion", _betas, ("beta1", "beta2"), 1, True, "arXiv 2302.06675"),
    "sgd": OptimizerRow("nesterovw", _momentum, ("beta1",), 1, True, "arXiv 1711.05101, algorithm 1"),
    "adafactor": OptimizerRow(
        "adafactorbv", _factored, ("beta1", "beta2"), 1, False, "arXiv 2106.04560, section 3.4"
    ),
}
