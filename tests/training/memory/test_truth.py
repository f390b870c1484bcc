"""The memory plan against resident memory, in processes of their own; the benchmark has more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = ("qwen3, checkpointing", "deepseek_v3, experts")
BENCH = Path(__file__).resolve().parents[3] / "eval" / "bench"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_told_is_measured(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-W", "ignore", str(BENCH / "memory.py"), "--device", "cpu"]
    command += ["--settings", *SETTINGS]
    done = subprocess.run(
        [*command, "--write", str(figures)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    assert set(rows) == set(SETTINGS)
    for name, row in rows.items():
        assert row["measured"] > 200e6, name  # what is compared is no noise
        # With latent attention up to 12 % too little is told on a CPU; why is not known yet.
        least = 0.85 if name.startswith("deepseek") else 0.9
        assert least < row["told / measured"] < 1.1, (name, row)
