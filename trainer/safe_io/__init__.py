"""Writes files whole or not at all, and opens files without trusting what others put there."""
