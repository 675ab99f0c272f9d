"""The command `clipship sweep`: a run for each combination of values, here or on a scheduler. No torch."""
