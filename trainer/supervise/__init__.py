"""The supervisor beside each rank: heartbeats, limits, diagnosis, and the end of a run.

Imports neither torch nor pydantic.
"""
