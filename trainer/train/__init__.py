"""Training on one rank: start, loop, step, prefetch, and the guard against non-finite gradients."""
