"""Facts about this machine and this process: memory, libraries, versions, environment variables.

Imports no torch.
"""
