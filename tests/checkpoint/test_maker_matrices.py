"""Matrices and modules that other programs adapt by name, as PEFT of each version resolved them."""

import json
import math
import re
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.cli import main
from moe_finetune.errors import AdapterError
from tests.checkpoint import helpers
from tests.checkpoint.drawn_adapters import RANK, SEVEN, check, on_linears, write
from tests.checkpoint.helpers import logits
from tests.support import names_on_disk, tiny_families


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "mixtral"])
@pytest.mark.parametrize("targets", ["list", "all-linear", "expression"])
def test_adapters_of_transformers_4(bases, family, targets, tmp_path):
    """LLaMA-Factory's ``lora_target: all``: each expert's, dense and shared matrices on their own.

    With rsLoRA and a rank of its own for one kind, as its and axolotl's recipes can have.
    """
    base = bases(family)
    stored = load_file(base / "model.safetensors")
    linear = [
        name.removesuffix(".weight")
        for name, tensor in stored.items()
        if tensor.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight"))
    ]
    last = names_on_disk.patterns(family)["down"].split(".")[-2]
    torch.manual_seed(9)
    tensors, changed = {}, dict(stored)
    for path in linear:
        rank = 6 if path.endswith(last) else RANK
        rows, columns = stored[f"{path}.weight"].shape
        a, b = torch.randn(rank, columns), torch.randn(rows, rank) * 0.02
        tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
        changed[f"{path}.weight"] = stored[f"{path}.weight"] + 12 / math.sqrt(rank) * b @ a
    ends = sorted({path.rpartition(".")[2] for path in linear})
    config = {
        "target_modules": {
            "list": ends,
            "all-linear": "all-linear",
            "expression": rf"model\.layers\.\d+\..*\.({'|'.join(map(re.escape, ends))})",
        }[targets],
        "use_rslora": True,
        "rank_pattern": {last: 6},
    }
    adapter = write(tmp_path / "adapter", config, tensors)
    merge_adapter(base, adapter, tmp_path / "merged")
    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(tensor, changed[name], rtol=1e-5, atol=1e-5)
    if targets == "list":
        check(base, adapter, logits(helpers.load(tmp_path / "merged")), tmp_path)
    key = f"base_model.model.{linear[-1]}.lora_B.weight"
    left = load_file(adapter / "adapter_model.safetensors")
    del left[key]
    save_file(left, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=re.escape(linear[-1])):
        merge_adapter(base, adapter, tmp_path / "refused")


def test_peft_now_makes_stacks_of_the_names_of_transformers_4(bases, tmp_path):
    """What LLaMA-Factory and axolotl get from PEFT for ``gate_proj`` and the like today."""
    base = bases("qwen3_moe")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(
            helpers.load(base),
            LoraConfig(
                r=4,
                lora_alpha=12,
                use_rslora=True,
                target_modules=["q_proj", "gate", "gate_proj", "up_proj", "down_proj"],
                task_type="CAUSAL_LM",
            ),
        )
    helpers.randomize(model, 3, 0.05)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["rank_pattern"] and "gate_up_proj" in config["target_parameters"]
    check(base, tmp_path / "adapter", logits(model), tmp_path)


@pytest.mark.parametrize("version", ["0.18.1", "0.21.2", "0.22.0"])
@pytest.mark.parametrize(
    "targets",
    [
        ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "o_proj"],
        [
            "model.layers.1.mlp.shared_experts.gate_proj",
            "model.layers.1.mlp.shared_experts.up_proj",
        ],
        r".*\.(shared_experts\.(gate|up)_proj|o_proj)",
    ],
    ids=["end", "path", "expression"],
)
def test_shared_experts_by_a_path_are_not_taken_for_routed_ones(
    bases, targets, version, tmp_path, capsys
):
    """PEFT 0.21 adapts the routed experts for such names, later ones and transformers 4 do not."""
    base = bases("deepseek_v3")
    tensors, changed = on_linears(base, ["gate_proj", "up_proj", "o_proj"])
    layer = ".layers.1." if "model.layers.1" in targets[0] else ""
    parts = ".shared_experts.", *(() if layer else (".o_proj",))
    tensors = {k: v for k, v in tensors.items() if layer in k and any(p in k for p in parts)}
    assert tensors
    config = {"target_modules": targets, "peft_version": version}
    adapter = write(tmp_path / "adapter", config, tensors)
    out = tmp_path / "merged"
    assert main(["merge", str(adapter), "--base", str(base), "--output", str(out), "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "only" not in shown and "routed" not in shown, shown
    stored = load_file(base / "model.safetensors")
    for name, tensor in load_file(out / "model.safetensors").items():
        adapted = f"{name.removesuffix('.weight')}.lora_A.weight" in tensors
        expected = changed[name] if adapted else stored[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", [{"peft_version": "0.18.1"}, {}])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_the_usual_seven_of_peft_0_18_on_transformers_5(bases, family, version, tmp_path, capsys):
    """``gate_proj`` and the like matched nothing in the stacks: the adapter has no experts."""
    base = bases(family)
    tensors, changed = on_linears(base, SEVEN)
    of_experts = [key for key in tensors if ".experts." in key]
    for key in of_experts:
        del tensors[key]
    stored = load_file(base / "model.safetensors")
    changed |= {name: stored[name] for name in changed if ".experts." in name}
    adapter = write(tmp_path / "adapter", {"target_modules": SEVEN} | version, tensors)
    out = tmp_path / "merged"
    assert main(["merge", str(adapter), "--base", str(base), "--output", str(out), "--verify"]) == 0
    said = {"qwen3_moe": "attention only", "deepseek_v2": "no routed experts"}
    assert said[family] in capsys.readouterr().out
    for name, tensor in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(tensor, changed[name], rtol=1e-5, atol=1e-5)
    check(base, adapter, logits(helpers.load(out)), tmp_path)
    adapter = write(tmp_path / "now", {"target_modules": SEVEN, "peft_version": "0.19.1"}, tensors)
    with pytest.raises(AdapterError, match="is missing"):
        merge_adapter(base, adapter, tmp_path / "refused")


def test_dora_on_single_experts_is_verified_by_tensors(bases, tmp_path, capsys):
    """PEFT has no form for it on stacks, so that no model can run it unmerged."""
    base = bases("qwen3_moe")
    tensors, changed = on_linears(base, SEVEN, use_dora=True)
    adapter = write(tmp_path / "adapter", {"target_modules": SEVEN, "use_dora": True}, tensors)
    out = tmp_path / "merged"
    assert main(["merge", str(adapter), "--base", str(base), "--output", str(out), "--verify"]) == 0
    assert "changed tensors are base + adapter" in capsys.readouterr().out
    for name, tensor in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(tensor, changed[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "saved", "ends"),
    [
        ("mixtral", "block_sparse_moe.gate", [".block_sparse_moe.gate"]),
        ("mixtral", "gate", [".block_sparse_moe.gate"]),
        ("qwen2_moe", "gate", [".mlp.gate", ".mlp.shared_expert_gate"]),
        ("qwen2_moe", "norm", [".input_layernorm", ".post_attention_layernorm", "model.norm"]),
    ],
)
@pytest.mark.parametrize("with_experts", [False, True])
def test_modules_to_save_of_transformers_4(family, saved, ends, with_experts, tmp_path):
    """PEFT saves each module whose path ends so, be it part of a name."""
    base = tmp_path / "base"
    tiny_families.model(family).save_pretrained(base)
    names = ["q_proj", *(["w2", "down_proj"] if with_experts else [])]
    tensors, changed = on_linears(base, names)
    for name in changed:
        if name.removesuffix(".weight").endswith(tuple(ends)):
            tensors[name] = changed[name] = changed[name] + torch.randn(changed[name].shape) * 0.05
    config = {"target_modules": names, "modules_to_save": [saved], "peft_version": "0.15.2"}
    adapter = write(tmp_path / "adapter", config, tensors)
    merge_adapter(base, adapter, tmp_path / "merged")
    assert verify_merge(base, adapter, tmp_path / "merged").layers
    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(tensor, changed[name], rtol=1e-5, atol=1e-5)


def test_biases_that_peft_forgot_are_refused_with_the_reason(tmp_path):
    base = tmp_path / "base"
    tiny_families.model("qwen2_moe").save_pretrained(base)
    tensors, _ = on_linears(base, SEVEN[:4])
    config = {"target_modules": SEVEN[:4], "bias": "lora_only"}
    adapter = write(tmp_path / "adapter", config, tensors)
    with pytest.raises(AdapterError, match="PEFT did not save the biases"):
        merge_adapter(base, adapter, tmp_path / "refused")


def test_a_matrix_that_the_files_have_inside_another_is_named(tmp_path):
    """Inkling's dense layers are stored as w13, which loading splits."""
    base = tmp_path / "base"
    tiny_families.model("inkling_mm_model").save_pretrained(base)
    path = "model.language_model.layers.0.mlp.gate_proj"
    a, b = torch.randn(RANK, tiny_families.HIDDEN), torch.randn(72, RANK)
    tensors = {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    adapter = write(tmp_path / "adapter", {"target_modules": ["mlp.gate_proj"]}, tensors)
    with pytest.raises(AdapterError, match="have this matrix and others in one tensor"):
        merge_adapter(base, adapter, tmp_path / "refused")
