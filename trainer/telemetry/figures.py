"""Figures of a run as metric writers show them: finite numbers in groups, each of which is a panel."""

import math
import re
from collections.abc import Mapping

GROUPS = (
    ("eval", r"((ema|mix)_)?(zero_shot_|retrieval_)"),
    ("goodput", r"useful_share$|lost_"),
    ("train", r"(loss|lr|grad_norm|logit_scale|logit_bias|epoch|samples|scaler_scale)$"),
    (
        "health",
        (
            r"bad_samples|samples_without|generation$|copied_|copies_|slow|straggler|non_finite|"
            r".*(cpu_share|rss_bytes|gpu_)"
        ),
    ),
    ("perf", r""),
)
"""Group and pattern of the names in it; the first that fits counts."""


def tag(name: str) -> str:
    """Returns the name with its group, such as `train/loss`."""
    group = next(group for group, pattern in GROUPS if re.match(pattern, name))
    return f"{group}/{name}"


def tagged(values: Mapping[str, object]) -> dict[str, float]:
    """Returns the finite numbers by their tags, without the step; writers cannot draw the others."""
    return {
        tag(name): float(value)
        for name, value in values.items()
        if name != "step"
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
    }
