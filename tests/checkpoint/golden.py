"""What merges changed when changed_tensors.json was written: new code must change the same."""

import json
import math
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

CHANGED = json.loads(Path(__file__).with_name("changed_tensors.json").read_text())
"""Family, or family and layout -> name without numbers -> [tensors, norm of their change]."""


def check_changed(case: str, base: Path, merged: Path) -> None:
    """Compare which tensors a merge changed, and how far, with the recorded ones."""
    rows: dict[str, list[float]] = {}
    before, after = (
        {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
        for folder in (base, merged)
    )
    for name, tensor in before.items():
        if not tensor.equal(after[name]):
            row = rows.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), [0, 0.0])
            row[0] += 1
            row[1] += float((after[name].double() - tensor.double()).square().sum())
    assert rows.keys() == CHANGED[case].keys()
    for name, (count, norm) in CHANGED[case].items():
        assert rows[name][0] == count, name
        assert math.sqrt(rows[name][1]) == pytest.approx(norm, rel=1e-4), name
