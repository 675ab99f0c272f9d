"""Runs one rank with its supervisor: `python -m trainer.rank JOB [--set KEY=VALUE ...]`.

Launchers and batch scripts call it.
"""

import sys

from trainer.supervise.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
