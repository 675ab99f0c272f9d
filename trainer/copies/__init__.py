"""Copies of a run where its data lie: written beside training, looked at, fetched. Imports no torch."""
