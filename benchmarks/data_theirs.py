"""open_clip_train's own loader on shards: `python bench_data_theirs.py PATTERN SAMPLES BATCHES [WORKERS]`.

Prints images per second, by the wall and of processor time. Runs in an environment of its own, so it imports
nothing of this project.
"""

import os
import sys
import time

import psutil
from open_clip import get_tokenizer, image_transform
from open_clip_train.data import get_wds_dataset
from open_clip_train.params import parse_args

BATCH, WARM_UP = 64, 2


def main(pattern: str, samples: str, batches: int, workers: str = "1") -> None:
    args = parse_args(
        [
            "--train-data",
            pattern,
            "--train-num-samples",
            samples,
            "--dataset-type",
            "webdataset",
            "--workers",
            workers,
            "--batch-size",
            str(BATCH),
        ]
    )
    args.rank, args.world_size, args.distributed = 0, 1, False
    os.environ.update(RANK="0", WORLD_SIZE="1")
    data = get_wds_dataset(
        args, image_transform(224, is_train=True), is_train=True, tokenizer=get_tokenizer("ViT-B-32")
    )
    stream = iter(data.dataloader)
    for _ in range(WARM_UP):
        next(stream)
    start, used = time.perf_counter(), processor_time()
    for _ in range(batches):
        images, _ = next(stream)
        assert images.shape == (BATCH, 3, 224, 224)
    print(BATCH * batches / (time.perf_counter() - start), BATCH * batches / (processor_time() - used))


def processor_time() -> float:
    """Seconds of this process and of the processes that load for it."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return float(sum(spent.user + spent.system for spent in times))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    sys.stdout.flush()
    os._exit(0)
