"""Start one program on several ranks of this machine (gloo, CPU)."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600


def run_ranks(module: str, world: int, *arguments: object) -> None:
    """Run ``python -m module ARGUMENTS`` as ``world`` ranks; an assertion shows what they said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=LIMIT_S)[1][-3000:] for process in running]
        assert [process.returncode for process in running] == [0] * world, "\n\n".join(said)
    finally:
        for process in running:  # the others wait for ever for one that failed
            process.kill()
            process.wait()


def furthest(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], least: float = 1e-6) -> float:
    """Largest difference of a tensor, relative to its largest entry, which is ``least`` or more."""
    assert got.keys() == wanted.keys() and wanted
    return max(
        float((got[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp_min(least))
        for n in wanted
    )
