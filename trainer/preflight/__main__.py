"""`python -m trainer.preflight JOB`, once for each rank, however it is started: the preflight under a supervisor. No torch."""

import sys

from trainer.rank import main

sys.exit(main(sys.argv[1:], "trainer.preflight.rank"))
