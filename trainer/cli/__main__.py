"""Makes `python -m trainer.cli` the command `clipship`."""

import sys

from trainer.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
