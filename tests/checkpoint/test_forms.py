"""Factors of experts as Tinker, SGLang, Megatron-Bridge and Automodel name them.

Each maker's formula is written out here, expert by expert; the names and shapes were read in
tinker-cookbook (``weights/_adapter.py``, ``weights/adapter_test.py``), Megatron-Bridge
(``conversion/peft_bridge.py``), Automodel (``_peft/lora_experts.py``) and vLLM 0.32
(``lora/lora_weights.py``).
"""

import math

import pytest
import torch
from safetensors.torch import load_file

from moe_finetune.checkpoint.adapters.convert import convert_adapter
from moe_finetune.checkpoint.adapters.forms import FORMS
from moe_finetune.checkpoint.adapters.in_peft import with_adapter
from moe_finetune.checkpoint.adapters.open_adapter import open_adapter
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.cli import main
from moe_finetune.errors import AdapterError
from moe_finetune.models import OURS
from tests.support.maker_formulas import (
    ALPHA,
    MAKERS,
    PROJECTIONS,
    RANK,
    Experts,
    W,
    automodel,
    logits,
    megatron,
    save,
    tinker,
)
from tests.support.tables import table

FEW = (
    "qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss", "nemotron_h", "qwen3_5_moe", "gemma4",
    "granitemoe", "aria", "inkling_mm_model",
)  # fmt: skip
NAMES = [family.name for family in OURS if family.name != "deepseek_moe"]


def same(found, wanted):
    """Logits, in which float32 rounding adds up; the weights are compared more closely."""
    assert float((found - wanted).norm()) < 1e-4 * float(wanted.norm())


def same_weights(model, expected):
    found = model.state_dict()
    for key, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "maker"), table(NAMES, MAKERS, every=len(MAKERS), whole_rows=FEW[::2])
)
def test_merged_and_in_peft_it_is_the_maker_s_formula(name, maker, tmp_path):
    from peft import PeftModel

    write, options = MAKERS[maker]
    experts = Experts(name, base=tmp_path / "base", **options)
    adapter = save(tmp_path / "adapter", *write(experts))
    before = logits(experts.model)
    expected = experts.change_model()
    wanted = logits(expected)
    assert (before - wanted).norm() > 0.01 * wanted.norm()

    merge_adapter(experts.base, adapter, tmp_path / "merged")
    merged = type(expected).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    same_weights(merged, expected)
    if name in FEW:  # it compares the merged weights, as the line before does
        verify_merge(experts.base, adapter, tmp_path / "merged")

    convert_adapter(adapter, experts.base, tmp_path / "peft", FORMS["peft"])
    plain = type(expected).from_pretrained(experts.base, dtype=torch.float32)
    if name == "deepseek_ocr2":  # PEFT 0.21.2 drops keys of this class, with a warning
        stock = with_adapter(plain, open_adapter(tmp_path / "peft", open_checkpoint(experts.base)))
    else:
        stock = PeftModel.from_pretrained(plain, tmp_path / "peft").eval()
    same(logits(stock), wanted)
    same_weights(stock.merge_and_unload(), expected)


def refused(adapter, base, *parts):
    """The error names the adapter's folder and each of ``parts``; nothing is written."""
    with pytest.raises(AdapterError) as raised:
        open_adapter(adapter, open_checkpoint(base))
    shown = str(raised.value)
    assert str(adapter) in shown
    for part in parts:
        assert part in shown, shown
    return shown


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """maker -> the experts of tiny Qwen3-MoE, its tensors and its config."""
    folder = tmp_path_factory.mktemp("forms")

    def get(maker):
        write, options = MAKERS[maker]
        experts = Experts("qwen3_moe", base=folder / "base", **options)
        return experts, *write(experts)

    return get


@pytest.mark.parametrize(
    ("maker", "missing", "named"),
    [
        ("tinker", "layers.2.mlp.experts.w1.lora_A.weight", "layers.2.mlp.experts.w1.lora_B"),
        ("tinker", "layers.1.mlp.experts.w2", "layers.1.mlp.experts.w2.lora_A.weight"),
        ("tinker", "layers.3.self_attn.q_proj", "layers.3.self_attn.q_proj.lora_A.weight"),
        ("megatron", "experts.7.down_proj.lora_A", "layers.0.mlp.experts.7.down_proj.lora_A"),
        ("megatron", "layers.1.mlp.experts.up_proj.lora_A", "up_proj.lora_B"),
        ("automodel", "layers.0.mlp.experts.lora_down_B", "layers.0.mlp.experts.lora_down_A"),
        ("automodel", "layers.3.mlp.experts", "layers.3.mlp.experts.lora_down_A"),
    ],
)
def test_a_partial_file_is_refused_with_the_key(made, maker, missing, named, tmp_path):
    experts, tensors, config = made(maker)
    left = {key: value for key, value in tensors.items() if missing not in key}
    assert len(left) < len(tensors)
    shown = refused(save(tmp_path / "adapter", left, config), experts.base, named, "missing")
    assert "copy the adapter again" in shown


def test_layers_that_did_not_train_are_named_by_the_user(made, tmp_path):
    experts, tensors, config = made("tinker")
    left = {key: value for key, value in tensors.items() if ".layers.0." not in key}
    refused(save(tmp_path / "adapter", left, config), experts.base, "layers_to_transform")
    adapter = save(tmp_path / "said", left, config | {"layers_to_transform": [1, 2, 3]})
    opened = open_adapter(adapter, open_checkpoint(experts.base))
    assert {update.name.split(".")[2] for update in opened.low_rank} == {"1", "2", "3"}


def test_mixed_and_doubled_files_are_refused_with_the_keys(made, tmp_path):
    experts, tensors, config = made("tinker")
    _, others, _ = made("automodel")
    mixed = tensors | {k: v for k, v in others.items() if "layers.2.mlp" in k}
    refused(
        save(tmp_path / "mixed", mixed, config),
        experts.base,
        "w1.lora_A.weight",
        "layers.2.mlp.experts.lora_down_A",
        "two programs",
    )
    experts, tensors, config = made("megatron")
    doubled = "model.layers.1.mlp.experts.gate_proj.lora_B.weight"
    factor = experts.factors[1, "gate"][1]
    refused(save(tmp_path / "doubled", tensors | {doubled: factor}, config), experts.base, doubled)


@pytest.mark.parametrize(
    ("layers", "part"),
    [([99], "99, which is no layer"), ("1", "'1', which is no layer"), ([1.5], "1.5, which is no"),
     ([0, 1], "lacks layer 2"), (3, "lacks layer 0")],
)  # fmt: skip
def test_layers_of_the_config_are_those_of_the_tensors(made, layers, part, tmp_path):
    experts, tensors, config = made("tinker")
    adapter = save(tmp_path / "adapter", tensors, config | {"layers_to_transform": layers})
    refused(adapter, experts.base, "layers_to_transform", part)


@pytest.mark.parametrize("maker", ["tinker", "megatron", "automodel"])
@pytest.mark.parametrize(
    "option", [{"exclude_modules": ["w2"]}, {"layers_pattern": "blocks"}], ids=lambda o: min(o)
)
def test_a_key_that_contradicts_the_tensors_is_refused(made, maker, option, tmp_path):
    experts, tensors, config = made(maker)
    adapter = save(tmp_path / "adapter", tensors, config | option)
    refused(adapter, experts.base, min(option), "Remove the key")
    empty = save(tmp_path / "empty", tensors, config | dict.fromkeys(option))
    assert open_adapter(empty, open_checkpoint(experts.base)).low_rank


@pytest.mark.parametrize("layers", [None, [], [0, 1, 2, 3]])
def test_a_config_of_all_layers_is_read(made, layers, tmp_path):
    experts, tensors, config = made("tinker")
    adapter = save(tmp_path / "adapter", tensors, config | {"layers_to_transform": layers})
    opened = open_adapter(adapter, open_checkpoint(experts.base))
    assert {update.name.split(".")[2] for update in opened.low_rank} == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("maker", "key", "second"),
    [
        ("tinker", "experts.w1", "experts.gate_proj"),
        ("tinker", "experts.w1", "experts.gate_up_proj"),
        ("megatron", "experts.gate_proj", "experts.w1"),
        ("megatron", "experts.4.down_proj", "experts.4.w2"),
    ],
)
def test_a_projection_under_two_names_is_refused_with_both(made, maker, key, second, tmp_path):
    experts, tensors, config = made(maker)
    path = f"model.layers.1.mlp.{key}.lora_"
    other = f"model.layers.1.mlp.{second}.lora_"
    added = {k.replace(path, other): 2 * v for k, v in tensors.items() if k.startswith(path)}
    assert added
    if "gate_up" in second:
        added = {k: torch.cat([v, v], 1) if "_B" in k else v for k, v in added.items()}
    refused(save(tmp_path / "adapter", tensors | added, config), experts.base, path, other)


@pytest.mark.parametrize(("option", "value"), [("alpha_pattern", 30.0), ("rank_pattern", 5)])
def test_a_pattern_of_one_expert_in_a_stack_is_refused_with_its_key(made, option, value, tmp_path):
    experts, tensors, config = made("megatron")
    adapter = save(tmp_path / "one", tensors, config | {option: {r"experts\.3\.down_proj": value}})
    refused(adapter, experts.base, "experts.3.down_proj.lora_A", option, str(value))


def test_projections_of_a_stack_with_two_scales_are_refused(made, tmp_path):
    experts, tensors, config = made("tinker")
    adapter = save(tmp_path / "adapter", tensors, config | {"alpha_pattern": {"w3": 30.0}})
    refused(adapter, experts.base, "experts.w1.lora_A.weight", "different scales")
    down = save(tmp_path / "down", tensors, config | {"alpha_pattern": {"w2": 30.0}})
    opened = open_adapter(down, open_checkpoint(experts.base))
    scales = {u.name.rpartition(".")[2]: u.scale for u in opened.low_rank if u.experts}
    assert scales == {"gate_up_proj": ALPHA / RANK, "down_proj": 30.0 / RANK}


@pytest.mark.parametrize(
    ("key", "change", "part"),
    [
        ("w1.lora_B", lambda v: v[:-1], "factors of 9 experts; the base has 10"),
        ("w2.lora_A", lambda v: v[:, :, :-1], "39 inputs where the base"),
        ("w3.lora_B", lambda v: v[:, 1:], "39 outputs where the base"),
        ("w1.lora_A", lambda v: v[:, 1:], "rank 2"),
        ("w1.lora_A", lambda v: v[None], "4 dimensions"),
    ],
)
def test_factors_of_another_size_are_refused_with_the_key(made, key, change, part, tmp_path):
    experts, tensors, config = made("tinker")
    name = f"model.layers.1.mlp.experts.{key}.weight"
    changed = tensors | {name: change(tensors[name])}
    refused(save(tmp_path / "adapter", changed, config), experts.base, name, part)


def test_the_rank_of_another_config_is_refused(made, tmp_path):
    experts, tensors, config = made("tinker")
    adapter = save(tmp_path / "adapter", tensors, config | {"r": 5})
    refused(adapter, experts.base, "w1.lora_A.weight", "has rank 3, but r of adapter_config.json")


def test_rows_that_alternate_must_be_stated(tmp_path):
    """gpt-oss: all rows of gate first, or one of each in turn; both have the same shape."""
    experts = Experts("gpt_oss", base=tmp_path / "base", shared=False, common_a=True)
    tensors, config = automodel(experts)
    del config["gate_up_rows"]
    refused(
        save(tmp_path / "adapter", tensors, config),
        experts.base,
        "lora_gate_and_up_B",
        '"gate_up_rows": "halves"',
    )
    for key, value in tensors.items():
        if key.endswith("lora_gate_and_up_B"):
            tensors[key] = value.unflatten(2, (2, -1)).mT.flatten(2)
    adapter = save(tmp_path / "said", tensors, config | {"gate_up_rows": "alternating"})
    merge_adapter(experts.base, adapter, tmp_path / "merged")
    verify_merge(experts.base, adapter, tmp_path / "merged")
    expected = experts.change_model()
    merged = type(expected).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    same(logits(merged), logits(expected))


def test_rslora_and_one_matrix_for_a_shared_factor(made, tmp_path):
    experts, tensors, config = made("tinker")
    single = {k: v[0] if v.ndim == 3 and len(v) == 1 else v for k, v in tensors.items()}
    assert any(v.ndim == 2 for k, v in single.items() if ".experts." in k)
    adapter = save(tmp_path / "adapter", single, config | {"use_rslora": True})
    merge_adapter(experts.base, adapter, tmp_path / "merged")
    verify_merge(experts.base, adapter, tmp_path / "merged")
    expected = experts.change_model(scale=ALPHA / math.sqrt(RANK))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for layer in (0, 3):
        for expert, row in ((0, 5), (9, 60)):
            half, name = divmod(row, experts.width)
            key = f"model.layers.{layer}.mlp.experts.{expert}.{('gate', 'up')[half]}_proj.weight"
            stack = expected.get_parameter(f"{experts.paths[layer]}.gate_up_proj")
            torch.testing.assert_close(merged[key][name], stack[expert, row], rtol=1e-5, atol=1e-5)


def test_tinker_s_own_names_for_composites_and_the_head(tmp_path):
    """``model.layers`` of a language part, ``unembed_tokens`` for the head."""
    experts = Experts("qwen3_vl_moe", base=tmp_path / "base", shared=True)
    tensors, config = tinker(experts)
    named = {key.replace("model.language_model.", "model."): v for key, v in tensors.items()}
    assert named.keys() != tensors.keys()
    head = experts.model.lm_head.weight
    a, b = torch.randn(RANK, head.shape[1]), torch.randn(head.shape[0], RANK)
    named |= {
        "model.unembed_tokens.lora_A.weight": a,
        "model.unembed_tokens.lora_B.weight": b,
    }
    adapter = save(tmp_path / "adapter", named, config)
    merge_adapter(experts.base, adapter, tmp_path / "merged")
    verify_merge(experts.base, adapter, tmp_path / "merged")
    expected = experts.change_model()
    with torch.no_grad():
        expected.lm_head.weight += ALPHA / RANK * b @ a
    merged = type(expected).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    same_weights(merged, expected)


MEGATRON_CONFIG = {
    "peft_type": "LORA", "auto_mapping": None, "base_model_name_or_path": "", "bias": "none",
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "lora_alpha": ALPHA, "lora_dropout": 0.0, "modules_to_save": None, "r": RANK,
    "rank_pattern": {}, "alpha_pattern": {}, "target_modules": [], "task_type": "CAUSAL_LM",
    "use_dora": False, "use_rslora": False,
}  # fmt: skip


def megatron_packed(experts):
    """Stacks in Megatron-Bridge's packing: A has the outputs, B the inputs by expert."""
    tensors, targets = {}, []
    for layer, path in experts.paths.items():
        gate_a, gate_b = experts.factors[layer, "gate"]
        up_b = experts.factors[layer, "up"][1]
        down_a, down_b = experts.factors[layer, "down"]
        for key, parameter, a, b in (
            (path, "down_proj", down_a, down_b),
            (f"{path}.base_layer", "gate_up_proj", gate_a, torch.cat([gate_b, up_b], 1)),
        ):
            targets.append(f"{path}.{parameter}")
            tensors |= {
                f"{key}.lora_A.weight": torch.cat([b_Or.T for b_Or in b]),
                f"{key}.lora_B.weight": torch.cat([a_rI.T for a_rI in a], 1),
            }
    return tensors, MEGATRON_CONFIG | {"target_parameters": targets}


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_megatron_s_packed_stacks(name, tmp_path):
    """PEFT would pair every expert with other experts' columns, without an error."""
    experts = Experts(name, base=tmp_path / "base", shared=False, common_a=True)
    tensors, config = megatron_packed(experts)
    adapter = save(tmp_path / "adapter", tensors, config)
    merge_adapter(experts.base, adapter, tmp_path / "merged")
    verify_merge(experts.base, adapter, tmp_path / "merged")
    expected = experts.change_model(attention=False)
    merged = type(expected).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    same_weights(merged, expected)


def test_megatron_s_stacks_in_another_packing_must_be_stated(tmp_path):
    """With the inputs in A it cannot be that of the known releases."""
    experts = Experts("qwen3_5_moe", base=tmp_path / "base", shared=False, common_a=True)
    tensors, config = megatron_packed(experts)
    for key in [key for key in tensors if "lora_A" in key]:
        other = key.replace("lora_A", "lora_B")
        tensors |= {key: tensors[other].T, other: tensors[key].T}
    command = ["merge", str(save(tmp_path / "adapter", tensors, config))]
    command += ["--base", str(experts.base), "--output", str(tmp_path / "out")]
    assert main(command) == 2
    assert not (tmp_path / "out").exists()
    refused(tmp_path / "adapter", experts.base, "lora_B_layout")
    said = save(tmp_path / "said", tensors, config | {"lora_B_layout": "grouped_by_expert"})
    merge_adapter(experts.base, said, tmp_path / "merged")
    expected = experts.change_model(attention=False)
    merged = type(expected).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    same(logits(merged), logits(expected))


def test_names_of_the_files_where_the_class_has_others(tmp_path):
    """Mixtral's files say block_sparse_moe and w1, w2, w3."""
    experts = Experts("mixtral", base=tmp_path / "base", shared=True, common_a=True)
    tensors, config = megatron(experts)
    renamed = {}
    for key, value in tensors.items():
        for role, projection in PROJECTIONS.items():
            if ".experts." in key:
                key = key.replace(projection, W[role]).replace(".mlp.", ".block_sparse_moe.")
        renamed[key] = value
    assert not any(".mlp." in key for key in renamed)
    adapter = save(tmp_path / "adapter", renamed, config)
    merge_adapter(experts.base, adapter, tmp_path / "merged")
    verify_merge(experts.base, adapter, tmp_path / "merged")
    expected = experts.change_model()
    merged = type(expected).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    same(logits(merged), logits(expected))
