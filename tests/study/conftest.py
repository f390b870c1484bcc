import json
from pathlib import Path

import pytest
import yaml

from tests.evaluation.local import write_suite


@pytest.fixture(scope="session")
def ingredients(tiny_checkpoint, tmp_path_factory) -> dict:
    """Base of a study on the tiny Qwen3-MoE: three steps, a local suite, transformers."""
    folder = tmp_path_factory.mktemp("ingredients")
    suite = write_suite(folder, items=11, shots=1)
    rows = [{"prompt": f"{a}+{a + 3}=", "completion": str(2 * a + 3)} for a in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"path": str(tiny_checkpoint("qwen3_moe")), "dtype": "float32"},
        "lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]},
        "data": {"train": str(folder / "train.jsonl"), "max_length": 64},
        "trainer": {
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "learning_rate": 0.01,
            "logging_steps": 1,
            "save_steps": 1,
            "report_to": "none",
        },
        "export": {"verify": False},
        "evaluation": {"suite": str(suite), "backend": "hf"},
    }


@pytest.fixture(autouse=True, scope="module")
def _warm(warm):
    """Rehearsals of runs are forked."""


@pytest.fixture
def write_study(tmp_path):
    """Write a study recipe and return its file."""

    def write(values: dict, name: str = "study.yaml") -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(values, sort_keys=False))
        return file

    return write
