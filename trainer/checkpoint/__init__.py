"""Checkpoints: whole files, sealed by a manifest, and the way a run continues from them."""
