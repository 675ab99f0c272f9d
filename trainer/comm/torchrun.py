"""torchrun that ends as its first failed rank did: that exit code, and one line instead of torchrun's traceback and table.

`python -m trainer.comm.torchrun` takes torchrun's arguments. A process of its own, since the launcher half never imports torch.
"""

import logging
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(arguments: Sequence[str]) -> int:
    """Start the ranks and wait for them; 128 + N where the first failure, or torchrun itself, was ended by signal N."""
    logging.disable(logging.CRITICAL)  # of this process only: it says again what the line below says
    try:
        torchrun(list(arguments))
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        how = f"exit code {first.exitcode}" if first.exitcode > 0 else f"signal {first.signal_name()}"
        print(f"torchrun: rank {rank} ended by {how}, the others with it", file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as stop:
        return 128 + stop.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
