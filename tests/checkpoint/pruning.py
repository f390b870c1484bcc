"""A pruning that is slow enough to be killed: ``python -m tests.checkpoint.pruning BASE OUT KEPT``.

Each tensor that is written is a line.
"""

import json
import sys
import time

from moe_finetune.checkpoint.prune import prune_experts


def slow(done: int, total: int) -> None:
    print(done, flush=True)
    time.sleep(0.05)


if __name__ == "__main__":
    kept = {int(layer): experts for layer, experts in json.loads(sys.argv[3]).items()}
    prune_experts(sys.argv[1], kept, sys.argv[2], progress=slow)
