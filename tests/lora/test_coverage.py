import pytest
import torch
from peft import LoraConfig, get_peft_model

from moe_finetune.lora.coverage import GROUPS, experts_line, group_of, lora_coverage
from moe_finetune.lora.targets import add_lora
from moe_finetune.models import FAMILIES, family_of
from moe_finetune.models.class_structure import meta_model
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.specialization import Specialization
from tests.support import tiny

HIDDEN, WIDTH, EXPERTS, RANK = 192, 48, 12, 8
# Decoder layers, MoE layers, attention tensors a layer that LoRA targets, shared experts.
SHAPES = {
    "qwen3_moe": (3, 3, 4, 0),
    "olmoe": (3, 3, 4, 0),
    "mixtral": (3, 3, 4, 0),
    "deepseek_v2": (3, 2, 4, 3),
    "deepseek_v3": (3, 2, 4, 3),
    "deepseek_moe": (3, 2, 4, 3),
}


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_groups_of_a_plain_model_are_the_configs_arithmetic(family):
    layers, moe, attention, shared = SHAPES[family]
    model = tiny.model(family)
    groups = lora_coverage(model).groups
    assert groups["attention"].tensors == layers * attention
    assert groups["router"].tensors == moe
    assert groups["router"].parameters == moe * EXPERTS * HIDDEN
    assert groups["routed experts"].tensors == 2 * moe
    assert groups["routed experts"].parameters == moe * EXPERTS * 3 * WIDTH * HIDDEN
    assert groups["shared experts"].tensors == (3 * moe if shared else 0)
    assert groups["shared experts"].parameters == moe * 3 * shared * WIDTH * HIDDEN
    total = lora_coverage(model).total
    assert total.parameters == sum(p.numel() for p in model.parameters())
    assert total.trained_parameters == total.reached_parameters == total.parameters


@pytest.mark.parametrize("router", ["full", "lora", "frozen"])
@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_an_adapter_on_everything_reaches_all_four_groups(family, router):
    _, moe, _, _ = SHAPES[family]
    section = LoraSection(rank=RANK, alpha=16.0)
    plain = lora_coverage(tiny.model(family))
    model = add_lora(tiny.model(family), section, router)
    coverage = lora_coverage(model)
    for name in GROUPS:
        assert coverage.groups[name].parameters == plain.groups[name].parameters, name
        assert coverage.groups[name].tensors == plain.groups[name].tensors, name
    for name in ("attention", "routed experts", "shared experts"):
        group = coverage.groups[name]
        assert group.reached_parameters == group.parameters, name
        assert group.trained_tensors == 2 * group.tensors, name
    experts = coverage.groups["routed experts"]
    assert experts.trained_parameters == moe * EXPERTS * RANK * (3 * WIDTH + 2 * HIDDEN)
    gate = coverage.groups["router"]
    assert gate.reached_tensors == (0 if router == "frozen" else moe)
    trained = {"full": EXPERTS * HIDDEN, "lora": RANK * (EXPERTS + HIDDEN), "frozen": 0}
    assert gate.trained_parameters == moe * trained[router]
    assert coverage.groups["other"].trained_tensors == 0
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert coverage.total.trained_tensors == len(names)


def test_a_partial_adapter_is_seen_as_partial():
    model = get_peft_model(tiny.model("qwen3_moe"), LoraConfig(r=4, target_modules=["q_proj"]))
    groups = lora_coverage(model).groups
    assert groups["attention"].reached_tensors == 3 and groups["attention"].tensors == 12
    assert groups["routed experts"].reached_tensors == 0
    assert "(0 %)" in lora_coverage(model).table()


def test_a_dense_layers_mlp_is_not_a_router():
    where = FAMILIES["deepseek_v2"].places(tiny.config("deepseek_v2"))
    assert where.moe_layers == (1, 2)
    assert group_of("model.layers.0.mlp.gate_proj.weight", where) == "other"
    assert group_of("model.layers.1.mlp.gate.weight", where) == "router"
    wrapped = "base_model.model.model.layers.2.mlp.experts.base_layer.lora_A.default.weight"
    assert group_of(wrapped, where) == "routed experts"
    assert group_of("model.layers.2.self_attn.kv_a_layernorm.weight", where) == "other"


def test_the_meta_device_counts_the_same_without_memory():
    config = tiny.config("deepseek_v3")
    section = LoraSection(rank=RANK, alpha=16.0)
    real = lora_coverage(add_lora(tiny.model("deepseek_v3"), section, "full"))
    model = meta_model(config)
    with torch.device("meta"):
        adapted = add_lora(model, section, "full")
    assert all(p.is_meta for p in adapted.parameters())
    assert lora_coverage(adapted) == real


def test_real_size_of_qwen3_30b_a3b():
    """30.5 B parameters, 3.3 B of them active: the model card's numbers."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, vocab_size=151936, norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    coverage = lora_coverage(meta_model(config))
    total, routed = coverage.total.parameters, coverage.groups["routed experts"].parameters
    assert total == 30_532_122_624
    assert routed == 48 * 128 * 3 * 768 * 2048
    assert 3.2e9 < total - routed * 120 / 128 < 3.4e9
    assert family_of(config).name == "qwen3_moe"
    assert coverage.groups["router"].parameters == 48 * 128 * 2048


def test_the_experts_line_has_what_trains_there():
    model = tiny.model("qwen3_moe")
    own = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert f"{own:,} parameters train (their weights), which change 100 %" in experts_line(model)
    model.requires_grad_(False)
    assert "nothing trains; give them LoRA" in experts_line(model)


def test_a_plain_loop_ends_with_where_the_figures_are(capsys):
    """It printed nothing at all."""
    model = tiny.model("qwen3_moe").train()
    with Specialization(model, "none") as losses:
        model(**tiny.batch(), use_cache=False).logits.sum().backward()
        losses.step()
    shown = capsys.readouterr().err
    assert "routed experts: " in shown and "routing: read() has the figures" in shown
    with pytest.raises(ZeroDivisionError), Specialization(model, "none"):
        _ = 1 / 0
    assert capsys.readouterr().err == ""
