"""Runs of a grid of values: their names, jobs, submission and results. Imports no torch."""
