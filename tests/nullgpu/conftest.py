"""Contracts of the GPU path; `make test-nullgpu` runs them on a null GPU, and no other target does."""

import os

if "NULLGPU_LIBRARY" in os.environ:
    from tests.support.null_gpu import gpu as gpu
    from tests.support.null_gpu import steps_of as steps_of
    from tests.support.null_gpu import stop_signal as stop_signal
else:
    collect_ignore_glob = ["test_*.py"]
