"""The run folder: its file names, its lock, and how a start of a run ended. Imports no torch."""
