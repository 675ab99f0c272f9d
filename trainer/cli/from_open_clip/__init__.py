"""Command `clipship from-open-clip`: job files of command lines of open_clip_train. Imports no torch."""
