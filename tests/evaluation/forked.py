"""``python -m tests.evaluation.forked CHECKPOINT SUITE`` evaluates into each folder of its stdin.

Each is a fork, which has the loaded model already and dies as wholly as a process of its own. Its
process id is printed, then its exit code.
"""

import os
import sys

from moe_finetune.evaluation.backends import open_backend
from moe_finetune.evaluation.engine import evaluate


def main(checkpoint: str, suite: str) -> None:
    opened = open_backend(checkpoint, "hf", batch_size=4)
    opened.chunk = 4
    for output in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                evaluate(checkpoint, suite, "hf", output.strip(), opened=opened, progress=False)
            except BaseException:
                os._exit(1)
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    # The lock of tqdm is shared between processes: one killed with it would stop all others.
    import threading

    import tqdm

    tqdm.tqdm.set_lock(threading.RLock())
    main(*sys.argv[1:])
