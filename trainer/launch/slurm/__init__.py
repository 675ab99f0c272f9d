"""Slurm: the batch script, and the code that submits, follows and cancels it."""
