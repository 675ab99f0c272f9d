"""Job files of command lines of open_clip_train. Imports no torch."""
