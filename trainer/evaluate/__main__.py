"""Runs a rank's work under a supervisor: `python -m trainer.evaluate JOB RESULT WORK ...`.

A launcher starts it once for each rank. No torch.
"""

import sys

from trainer.supervise.main import main

sys.exit(main(sys.argv[1:], "trainer.evaluate.rank", restarts=False))
