"""The four published configs at full size on the meta device: counts, names, families."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from moe_finetune.models import family_of
from moe_finetune.models.loading import load_config

FIXTURES = Path(__file__).parents[1] / "fixtures"
# parameters as the hub counts them (Moonlight's also has 26 x 64 router biases, not parameters);
# layers, MoE layers, experts, expert width
FACTS = {
    "deepseek_moe_16b": ("deepseek_moe", 16_375_728_128, 28, 27, 64, 1408),
    "deepseek_v2_lite": ("deepseek_v2", 15_706_484_224, 27, 26, 64, 1408),
    "moonlight_16b_a3b": ("moonlight", 15_960_108_544, 27, 26, 64, 1408),
    "qwen3_30b_a3b": ("qwen3_moe", 30_532_122_624, 48, 48, 128, 768),
}


@pytest.mark.parametrize("name", FACTS)
def test_published_config_gives_the_published_model(name, tmp_path):
    family_name, parameters, layers, sparse_layers, experts, width = FACTS[name]
    shutil.copy(FIXTURES / f"{name}.json", tmp_path / "config.json")
    config = load_config(tmp_path)
    family = family_of(config)
    assert family.name == family_name
    assert not hasattr(config, "auto_map")
    assert (family.num_experts(config), family.expert_width(config)) == (experts, width)
    sparse = family.moe_layers(config)
    assert (config.num_hidden_layers, len(sparse)) == (layers, sparse_layers)

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == family.class_name
    assert sum(p.numel() for p in model.parameters()) == parameters

    on_disk = revert_weight_conversion(model, model.state_dict())
    expert_names = {
        family.disk.name(part, layer, expert): shape
        for layer in sparse
        for expert in range(experts)
        for part, shape in {
            "gate": (width, 2048),
            "up": (width, 2048),
            "down": (2048, width),
        }.items()
    }
    assert {n for n in on_disk if ".experts." in n} == expert_names.keys()
    assert all(tuple(on_disk[n].shape) == shape for n, shape in expert_names.items())
    routers = {family.disk.name("router", layer) for layer in sparse}
    assert all(tuple(on_disk[n].shape) == (experts, 2048) for n in routers)
    biases = {n for n in on_disk if n.endswith("e_score_correction_bias")}
    assert biases == (
        {family.disk.name("router_bias", layer) for layer in sparse}
        if family.disk.router_bias
        else set()
    )
