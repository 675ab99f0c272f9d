"""The command line: one module per command. Imports no torch; only `clipship train` starts code that does."""
