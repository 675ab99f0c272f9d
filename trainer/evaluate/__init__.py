"""Evaluation on all ranks: zero-shot classification and retrieval."""
