"""Table of optimizers: a row holds all that other modules need to know about one. Imports no torch.

Every row but AdamW's is made by timm's factory. A checkpoint takes the tensors that an optimizer keeps for
each parameter: `trainer.model.optimizer` puts what LAMB and Muon keep elsewhere there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

OptimizerName = Literal["adamw", "nadamw", "adopt", "lion", "sgd", "adafactor", "lamb", "muon"]
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
    state: tuple[str, ...]
    """Names of the tensors that it keeps for a parameter, for each of its rules."""
    elementwise: bool
    """True if the update of a value depends on no other value of its parameter.

    Ranks that hold rows of a parameter then compute the same as one rank with all of it.
    """
    source: str
    """Paper that defines it."""
    other_values: int | None = None
    """Values that it keeps for a parameter that is no matrix of a layer, if it treats these as AdamW does."""
    differs_there: str = ""
    """Difference from what open_clip_train gets of timm under the factory's name."""
    synonym: str = ""
    """Another name by which timm's factory makes the same."""
    group_counts: bool = False
    """True if timm's counts its steps for a group of parameters, and keeps no `step` of each."""

    @property
    def by_matrix(self) -> bool:
        """True if matrices of layers have a rule of their own."""
        return self.other_values is not None

    def kept(self, parameters: int, others: int) -> int:
        """Returns the values that it keeps for so many parameters, of which `others` are no matrices."""
        return self.state_values * (parameters - others) + (self.other_values or self.state_values) * others


def _betas(beta1: float, beta2: float, _eps: float) -> Mapping[str, Any]:
    return {"betas": (beta1, beta2)}


def _betas_and_eps(beta1: float, beta2: float, eps: float) -> Mapping[str, Any]:
    return {"betas": (beta1, beta2), "eps": eps}


def _momentum(beta1: float, _beta2: float, _eps: float) -> Mapping[str, Any]:
    return {"momentum": beta1}


def _factored(beta1: float, beta2: float, _eps: float) -> Mapping[str, Any]:
    # The momentum has the parameters' type: a checkpoint could not give it back in half precision.
    return {"momentum": beta1, "beta2_cap": beta2, "momentum_dtype": "float32"}


def _unclipped(beta1: float, beta2: float, eps: float) -> Mapping[str, Any]:
    # `optim.grad_clip_norm` clips; timm's own limit would be a norm of 1.
    return {**_betas_and_eps(beta1, beta2, eps), "max_grad_norm": None}


def _orthogonal(beta1: float, beta2: float, eps: float) -> Mapping[str, Any]:
    # Updates as large as AdamW's, so that one learning rate serves matrices and all else.
    ours = {"momentum": beta1, "adjust_lr_fn": "match_rms_adamw", "ns_coefficients": "original"}
    return {**_betas_and_eps(beta1, beta2, eps), **ours}


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

_ADAM = ("exp_avg exp_avg_sq step",)

OPTIMIZERS: Mapping[OptimizerName, OptimizerRow] = {
    "adamw": OptimizerRow("", _betas_and_eps, ("beta1", "beta2", "eps"), 2, _ADAM, True, "arXiv 1711.05101"),
    "nadamw": OptimizerRow(
        "nadamw", _betas_and_eps, ("beta1", "beta2", "eps"), 2, _ADAM, True, "arXiv 2306.07179, appendix C"
    ),
    "adopt": OptimizerRow(
        "adoptw", _betas_and_eps, ("beta1", "beta2", "eps"), 2, _ADAM, True, "arXiv 2411.02853"
    ),
    "lion": OptimizerRow("lion", _betas, ("beta1", "beta2"), 1, ("exp_avg",), True, "arXiv 2302.06675"),
    "sgd": OptimizerRow(
        "nesterovw",
        _momentum,
        ("beta1",),
        1,
        ("momentum_buffer",),
        True,
        "arXiv 1711.05101, algorithm 1",
        synonym="sgdw",
    ),
    "adafactor": OptimizerRow(
        "adafactorbv",
        _factored,
        ("beta1", "beta2"),
        1,
        (*_ADAM, "exp_avg exp_avg_sq_c exp_avg_sq_r step"),
        False,
        "arXiv 2106.04560, section 3.4",
    ),
    "lamb": OptimizerRow(
        "lamb",
        _unclipped,
        ("beta1", "beta2", "eps"),
        2,
        _ADAM,
        False,
        "arXiv 1904.00962",
        differs_there="timm's clips the gradient at a norm of 1 by itself",
        group_counts=True,
    ),
    "muon": OptimizerRow(
        "muon",
        _orthogonal,
        ("beta1", "beta2", "eps"),
        1,
        ("momentum_buffer", *_ADAM),
        False,
        "arXiv 2502.16982",
        other_values=2,
        differs_there="timm's takes tables of embeddings for matrices, and NAdamW for the rest",
    ),
}
