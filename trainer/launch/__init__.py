"""Starts ranks: on this machine, over ssh, by Slurm, by Kubernetes. Imports no torch."""
