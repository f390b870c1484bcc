"""A target that a model lacks is worth a warning where the user named it."""

import pytest

from moe_finetune.lora.targets import lora_config
from moe_finetune.recipe.sections import LoraSection
from tests.support import tiny


@pytest.mark.parametrize("named", [True, False])
def test_only_a_named_target_warns(named, caplog):
    targets = {"targets": ["attention", "shared_experts"]} if named else {}
    model = tiny.model("qwen3_moe")
    lora_config(model, LoraSection(rank=3, **targets), "full")
    assert ("has no shared_experts" in caplog.text) is named
