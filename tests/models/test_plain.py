"""What is written down of the core families' checkpoints is what their classes build."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint.opened import open_plain
from moe_finetune.errors import MoeFinetuneError
from moe_finetune.io.config_file import check_config
from moe_finetune.models import family_of
from moe_finetune.models.loading import parse_config
from moe_finetune.models.plain_config import plain_config
from moe_finetune.models.plain_tensors import files, parameters
from moe_finetune.models.structure import meta_model, shapes_on_disk
from moe_finetune.training import inspection
from moe_finetune.training.inspection import inspect_checkpoint
from tests import tiny
from tests.published import fixture

PUBLISHED = ("deepseek_moe_16b", "deepseek_v2_lite", "moonlight_16b_a3b", "qwen3_30b_a3b")
SHARD = "model.safetensors"

VARIANTS = [
    ("qwen3_moe", {"mlp_only_layers": [1]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"sliding_window": 64, "use_sliding_window": True}),
    ("deepseek_v2", {"q_lora_rank": 20}),
    ("moonlight", {"q_lora_rank": 20, "first_k_dense_replace": 2}),
    ("moonlight", {"n_group": 3, "topk_group": 2, "n_shared_experts": 1}),
    ("deepseek_moe", {"moe_layer_freq": 2, "first_k_dense_replace": 0}),
    ("deepseek_moe", {"head_dim": 16}),
    ("mixtral", {"head_dim": 16, "num_key_value_heads": 1}),
]
ODD = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    5,
    6,
    0.5,
    -0.5,
    1e9,
    "x",
    "gelu",
    [],
    [1],
    ["a"],
    {},
    {"a": 1},
)


def raw_config(family: str) -> dict:
    return json.loads(tiny.config(family).to_json_string())


def same_as_the_class(raw: dict, folder: Path) -> None:
    """What is told of the config is what transformers builds from it."""
    family = family_of(raw)
    config = plain_config(raw, family)
    assert config is not None
    (folder / "config.json").write_text(json.dumps(raw))
    real = parse_config(folder)
    built = meta_model(real)
    named = {name: tuple(tensor.shape) for name, tensor in built.named_parameters()}
    assert parameters(config, family) == named
    assert files(config, family) == shapes_on_disk(real)
    for fact in ("num_experts", "renormalize", "scaling", "top_k", "moe_layers", "expert_width"):
        assert getattr(family, fact)(config) == getattr(family, fact)(real), fact
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        assert getattr(config, key) == getattr(real, key)


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_tiny(family, tmp_path):
    same_as_the_class(raw_config(family), tmp_path)


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=str)
def test_variants(family, changes, tmp_path):
    same_as_the_class(raw_config(family) | changes, tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name, tmp_path):
    same_as_the_class(fixture.read(name).config, tmp_path)


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_what_the_class_would_refuse_or_build_otherwise_is_not_plain(family, tmp_path):
    """Any one key gone, or with another value: not plain, or the same as the class."""
    raw = raw_config(family)
    changed = [{k: v for k, v in raw.items() if k != key} for key in raw]
    changed += [raw | {key: value} for key in raw for value in ODD if value != raw[key]]
    changed += [raw | {"rope_parameters": raw["rope_parameters"] | {"factor": 4.0}}]
    changed += [raw | {"auto_map": names} for names in (*ODD, {"AutoConfig": "own.Config"})]
    changed += [raw | {"unheard_of": 3}, raw | {"pad_token_id": raw["vocab_size"]}]
    told = 0
    for other in changed:
        try:
            check_config(other, "config.json")
            family_of(other)
        except MoeFinetuneError:
            continue
        if plain_config(other, family_of(raw)) is not None:
            same_as_the_class(other, tmp_path)
            told += 1
    assert 20 < told < len(changed) / 2


def test_other_families_are_asked():
    raw = raw_config("qwen3_moe")
    assert plain_config(raw, family_of({"model_type": "qwen2_moe"})) is None


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_inspect_says_the_same_either_way(tiny_checkpoint, family, monkeypatch):
    folder = str(tiny_checkpoint(family))
    assert open_plain(folder) is not None
    quick = inspect_checkpoint(folder)
    monkeypatch.setattr(inspection, "_plain", lambda path: None)
    asked = inspect_checkpoint(folder)
    assert quick.to_mapping() == asked.to_mapping() and quick.text() == asked.text()


@pytest.mark.parametrize("defect", ["missing", "extra", "shape", "dtype"])
def test_files_that_differ_are_not_plain(tiny_checkpoint, tmp_path, defect):
    folder = tmp_path / "base"
    shutil.copytree(tiny_checkpoint("olmoe"), folder)
    tensors = load_file(folder / SHARD)
    name = "model.layers.1.self_attn.q_norm.weight"
    if defect == "missing":
        del tensors[name]
    elif defect == "extra":
        tensors["model.layers.1.more.weight"] = tensors[name].clone()
    elif defect == "shape":
        tensors[name] = torch.cat([tensors[name]] * 2)
    else:
        tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, folder / SHARD)
    assert open_plain(folder) is None


def test_inspect_imports_no_torch(tiny_checkpoint):
    script = (
        "import sys; from moe_finetune.cli import main; code = main(sys.argv[1:])\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\nsys.exit(code)"
    )
    command = [sys.executable, "-c", script, "inspect", str(tiny_checkpoint("mixtral"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "12 routed" in done.stdout
