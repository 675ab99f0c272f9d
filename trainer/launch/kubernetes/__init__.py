"""Kubernetes: the MPIJob, and the code that submits, follows and cancels it."""
