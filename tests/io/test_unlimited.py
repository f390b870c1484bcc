"""The one value of a config.json that may be infinite."""

import json

import pytest

from moe_finetune.checkpoint.export import carried_files
from moe_finetune.errors import CheckpointError
from moe_finetune.io.checkpoint_files import read_config


def test_mamba_s_time_steps_may_have_no_limit_and_nothing_else(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "nemotron_h", "time_step_limit": [0.0, Infinity]}')
    assert read_config(tmp_path)["time_step_limit"] == [0.0, float("inf")]
    carried = json.loads(carried_files(tmp_path, {"dtype": "float32"})["config.json"])
    assert carried["time_step_limit"] == [0.0, float("inf")] and carried["dtype"] == "float32"
    for value in ("Infinity", "NaN", "[1.0, 1e999]", '{"factor": -Infinity}'):
        file.write_text(f'{{"model_type": "nemotron_h", "rope_scaling": {value}}}')
        with pytest.raises(CheckpointError, match=r"config.json: rope_scaling contains NaN"):
            read_config(tmp_path)
