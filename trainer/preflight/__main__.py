"""Runs the preflight under a supervisor, once for each rank: `python -m trainer.preflight JOB`. No torch."""

import sys

from trainer.supervise.main import main

sys.exit(main(sys.argv[1:], "trainer.preflight.rank", restarts=False))
