"""One supervisor and its own rank: how it starts, what it does, how it ends."""
