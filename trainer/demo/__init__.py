"""The demo: a small CLIP learns handwritten digits."""
