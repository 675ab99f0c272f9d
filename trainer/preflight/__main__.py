"""Runs the preflight under a supervisor, once for each rank: `python -m trainer.preflight JOB`. No torch."""

import sys

from trainer.sysinfo.signals import collect_requests

collect_requests()
from trainer.supervise.main import main  # noqa: E402

sys.exit(main(sys.argv[1:], "trainer.preflight.rank", restarts=False))
