"""Job files to start from: the presets, and what `clipship init` makes of one. Imports no torch."""
