"""Runs one rank with its supervisor: `python -m trainer.rank JOB [--set KEY=VALUE ...]`.

Launchers and batch scripts call it.
"""

import sys

from trainer.sysinfo.signals import collect_requests

if __name__ == "__main__":
    collect_requests()
    from trainer.supervise.main import main

    sys.exit(main(sys.argv[1:]))
