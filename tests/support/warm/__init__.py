"""Starts of ranks that need no import of torch: they are forks of an interpreter that has imported it."""
