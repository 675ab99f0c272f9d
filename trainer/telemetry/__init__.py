"""Metrics of a run: records, their writers, figures of each rank, stragglers, profiles."""
