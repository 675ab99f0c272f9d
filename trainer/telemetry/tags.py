"""Groups the figures of a record for TensorBoard and W&B, which show one panel for each group. Pure."""

import re

GROUPS = (
    ("eval", r"((ema|mix)_)?(zero_shot_|retrieval_)"),
    ("goodput", r"useful_share$|lost_"),
    ("train", r"(loss|lr|grad_norm|logit_scale|logit_bias|epoch|samples|scaler_scale)$"),
    ("health", r"bad_samples|generation$|slow|straggler|non_finite|.*(cpu_share|rss_bytes|gpu_)"),
    ("perf", r""),
)
"""Group and pattern of the names in it; the first that fits counts."""


def tag(name: str) -> str:
    """Returns the name with its group, such as `train/loss`."""
    group = next(group for group, pattern in GROUPS if re.match(pattern, name))
    return f"{group}/{name}"
