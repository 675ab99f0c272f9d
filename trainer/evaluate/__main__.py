"""Runs the evaluation under a supervisor, once for each rank: `python -m trainer.evaluate JOB RESULT [KEPT]`.

No torch.
"""

import sys

from trainer.supervise.main import main

sys.exit(main(sys.argv[1:], "trainer.evaluate.rank", restarts=False))
