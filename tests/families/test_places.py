"""What each family's class shows, on every supported version of transformers, as
``places.json`` says; and classes that do not show it are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models import FAMILIES
from moe_finetune.models.suggest_plugin import suggestion
from tests.support import places, tiny_families

GOLDEN = json.loads(Path(__file__).with_name("places.json").read_text())

OLDER = Version(transformers.__version__) < Version("5.19")
LATER = (
    *("aria", "aria_text", "granitemoe", "granitemoehybrid", "granitemoeshared"),
    *("nemotron_h", "glm_moe_dsa"),  # whose configs have other layers there
)


def shown(family: str) -> str:
    """The places of a family's tiny model in one line."""
    found = places.places(family)
    kind = "gated" if found.gated else "not gated"
    space = " in a space of their own" if found.separate_spaces else ""
    return (
        f"{found.backbone}.layers {' '.join(map(str, found.moe_layers))}: {found.router_path} "
        f"{found.router_weight}, {found.experts_path} {found.num_experts} {kind}{space}, "
        f"{found.expert_width} wide; attention {' '.join(sorted(found.attention))}; "
        f"shared {' '.join(sorted(found.shared)) or '-'}"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_shows_what_it_did(family):
    if OLDER and (family in LATER or FAMILIES[family].model_type not in CONFIG_MAPPING):
        pytest.skip("this transformers has not its class, or not on the experts interface")
    assert shown(family) == GOLDEN[family]


def test_a_class_that_shows_no_attention_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("moe_finetune.models.module_places.MIXERS", ("mamba",))
    config = tiny_families.config("glm4_moe", num_hidden_layers=5)
    with pytest.raises(UnsupportedModelError, match=r"Glm4MoeForCausalLM: no linear layer of att"):
        FAMILIES["glm4_moe"].places(config)
    assert "Glm4MoeForCausalLM: no linear layer" in suggestion(config.to_dict())
    told = replace(FAMILIES["glm4_moe"], attention_targets=("self_attn.q_proj",))
    assert told.places(config).attention == ("self_attn.q_proj",)


def test_a_module_next_to_the_block_that_is_not_known_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("moe_finetune.models.module_places.SHARED", ())
    config = tiny_families.config("gemma4_text", vocab_size=408)
    with pytest.raises(UnsupportedModelError, match=r"Gemma4ForCausalLM: .mlp. of its layers is n"):
        FAMILIES["gemma4_text"].places(config)


def test_a_block_with_two_possible_routers_is_refused_by_name(monkeypatch):
    """As Qwen3-Next-80B: a shared expert's weight has as many rows as the router."""
    config = tiny_families.config("qwen2_moe", num_experts=5, shared_expert_intermediate_size=5)
    assert FAMILIES["qwen2_moe"].places(config).router_path == "mlp.gate"
    monkeypatch.setattr("moe_finetune.models.class_structure.ROUTERS", ())
    config = tiny_families.config("qwen2_moe", num_experts=6, shared_expert_intermediate_size=6)
    with pytest.raises(UnsupportedModelError, match=r"Qwen2MoeForCausalLM: .*gate.weight and shar"):
        FAMILIES["qwen2_moe"].places(config)
