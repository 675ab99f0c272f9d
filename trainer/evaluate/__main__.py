"""`python -m trainer.evaluate JOB RESULT`, once for each rank: the evaluation under a supervisor. No torch."""

import sys

from trainer.rank import main

sys.exit(main(sys.argv[1:], "trainer.evaluate.rank"))
