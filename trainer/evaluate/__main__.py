"""Runs a rank's work under a supervisor: `python -m trainer.evaluate JOB RESULT WORK ...`.

A launcher starts it once for each rank. No torch.
"""

import sys

from trainer.sysinfo.signals import collect_requests

collect_requests()
from trainer.supervise.main import main  # noqa: E402

sys.exit(main(sys.argv[1:], "trainer.evaluate.rank", restarts=False))
