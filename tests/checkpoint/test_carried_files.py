"""Small files that a merge carries: the ids that training saw, in every loader."""

import json

import pytest
from transformers import AutoTokenizer

from moe_finetune.checkpoint.small_files import carried_files
from moe_finetune.errors import CheckpointError
from moe_finetune.io.checkpoint_files import read_config
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from tests.support import tiny


def test_a_plain_tokenizer_is_carried_byte_for_byte(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    files = carried_files(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert files[name] == (tmp_path / name).read_bytes()


def test_a_begin_of_sequence_that_loaders_ignore_is_written_out(tmp_path):
    source, made = tmp_path / "base", tmp_path / "made"
    tiny.tokenizer().save_pretrained(source)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings |= {"add_bos_token": True, "bos_token": "<|im_start|>", "auto_map": {"x": ["a.B"]}}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    made.mkdir()
    for name, content in carried_files(source).items():
        (made / name).write_bytes(content)
    wanted = load_tokenizer(source)("héllo").input_ids
    assert wanted[0] == 1  # <|im_start|>
    assert AutoTokenizer.from_pretrained(made)("héllo").input_ids == wanted
    assert b"auto_map" not in (made / "tokenizer_config.json").read_bytes()


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
