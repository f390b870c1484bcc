"""``python -m tests.checkpoint.slow_merge BASE ADAPTER TARGET`` tells each piece that it wrote."""

import sys
import time

from moe_finetune.checkpoint import merge_adapter


def slow(done: int, total: int) -> None:
    print(done, flush=True)
    time.sleep(0.01)


if __name__ == "__main__":
    merge_adapter(*sys.argv[1:4], progress=slow, workers=1)
