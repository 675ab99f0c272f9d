"""Arithmetic of a step, of its memory, of more GPUs and of faults. Measures nothing; imports no torch."""
