from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_folder() -> Path:
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("MOE_FINETUNE_DATA", beside))
    if not (folder / "gsm8k_test.jsonl").is_file():
        pytest.skip(f"no shared data at {folder}; set MOE_FINETUNE_DATA")
    return folder
