"""Checks of nodes, network and collectives before a run trains."""
