"""``make gpu-check`` as far as a CPU goes: every check runs or says why not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "gpu_check.py"


def check(*options):
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *options],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_a_cpu(tmp_path):
    page = tmp_path / "check.md"
    done = check("--device", "cpu", "--tiny", "--output", str(page))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    text = page.read_text(encoding="utf-8")
    result = json.loads(text.partition("```json\n")[2].partition("\n```")[0])
    rows = result["checks"]
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert set(outcomes.values()) == {"ok"} and len(outcomes) == 3, text
    assert "ours+all" in rows["step"]["figures"]["tiny"]["rows"]
    assert rows["memory plan"]["figures"]["qwen3, attention"]["predicted"] > 1e8
    assert "| step | ok |" in text and "tests" in rows["tests marked gpu"]["figures"]["result"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is reported without a GPU")
def test_without_a_gpu(tmp_path):
    page = tmp_path / "check.md"
    done = check("--device", "cuda", "--output", str(page))
    assert done.returncode == 2 and not page.exists()
    assert "no GPU here; --device cpu --tiny" in done.stderr
