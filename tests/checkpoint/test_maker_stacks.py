"""Stacks of experts as other programs pack them, against each program's formula, said again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from moe_finetune.checkpoint.adapters import open_adapter
from moe_finetune.checkpoint.adapters.factor_layout import as_a
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.cli import main
from moe_finetune.errors import AdapterError, NumericsError
from tests.checkpoint import helpers
from tests.checkpoint.drawn_adapters import (
    RANK,
    SCALE,
    SEVEN,
    changed_by,
    check,
    on_linears,
    same,
    write,
)
from tests.checkpoint.helpers import EXPERTS, logits
from tests.support import tiny, tiny_families

UNSLOTH = {
    "auto_mapping": {"base_model_class": "Qwen3MoeForCausalLM", "unsloth_fixed": True},
    "peft_version": "0.21.0",
}


def fused(base, folder, by_expert, outputs_first, **config) -> tuple[Path, dict]:
    """An adapter on the stacks and one attention module; the change of each of the model's own."""
    torch.manual_seed(5)
    model, tensors, deltas = helpers.load(base), {}, {}
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".")
        if name.endswith("q_proj.weight"):
            a, b = torch.randn(RANK, parameter.shape[1]), torch.randn(parameter.shape[0], RANK)
            tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b * 0.02}
            deltas[name] = SCALE * b * 0.02 @ a
        if not path.endswith("mlp.experts") or parameter.ndim != 3:
            continue
        experts, rows, columns = parameter.shape
        ends = (rows, columns) if outputs_first else (columns, rows)
        a = torch.randn(experts * RANK, ends[0])
        b = torch.randn(ends[1], experts * RANK) * 0.02
        of_b = [
            b[:, e * RANK : (e + 1) * RANK] if by_expert else b[:, e::experts]
            for e in range(experts)
        ]
        each = [SCALE * of_b[e] @ a[e * RANK : (e + 1) * RANK] for e in range(experts)]
        deltas[name] = torch.stack([d.T if outputs_first else d for d in each])
        key = f"{path}.base_layer" if last == "gate_up_proj" else path
        tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    targets = {"target_parameters": list(EXPERTS)}
    return write(folder, targets | config, tensors), deltas


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    ("maker", "by_expert", "outputs_first", "config"),
    [
        ("peft_0.21", False, False, {"peft_version": "0.21.2"}),
        ("peft_0.18", False, True, {"peft_version": "0.18.1"}),
        ("axolotl", False, False, {"target_parameters": ["gate_up_proj", "down_proj"],
                                   "peft_version": "0.19.1"}),
        ("unsloth_marked", True, False, UNSLOTH | {"lora_B_layout": "grouped_by_expert"}),
        ("unsloth_0.18", True, True, UNSLOTH | {"lora_B_layout": "grouped_by_expert",
                                                "peft_version": "0.18.0"}),
        ("unsloth_now", False, False, UNSLOTH | {"lora_B_layout": "rank_major"}),
        ("unsloth_detail", True, False, UNSLOTH | {
            "lora_B_layout": "rank_major",
            "unsloth_fused_expert_lora": {"parameters": {
                "gate_up_proj": {"lora_B_layout": "grouped_by_expert", "num_experts": 12},
                "down_proj": {"lora_B_layout": "grouped_by_expert", "num_experts": 12},
            }},
        }),
    ],
)  # fmt: skip
def test_stacks(bases, family, maker, by_expert, outputs_first, config, tmp_path):
    base = bases(family)
    adapter, deltas = fused(base, tmp_path / maker, by_expert, outputs_first, **config)
    check(base, adapter, changed_by(base, deltas), tmp_path)


def test_files_that_hold_stacks(tmp_path):
    """gpt-oss holds (expert, in, out), with rows of gate and up in turn, whichever the version."""
    base = tmp_path / "gpt_oss"
    tiny_families.model("gpt_oss").save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    for version in ("0.18.1", "0.21.2"):
        adapter, deltas = fused(base, tmp_path / version, False, True, peft_version=version)
        tensors = load_file(adapter / "adapter_model.safetensors")
        # The class's own layout: inputs in A, whatever wrote it.
        model = helpers.load(base)
        down = model.get_parameter("model.layers.0.mlp.experts.down_proj")
        assert (
            tensors["base_model.model.model.layers.0.mlp.experts.lora_A.weight"].shape[1]
            == (down.shape[1])
        )
        check(base, adapter, changed_by(base, deltas), tmp_path)
        (tmp_path / f"merged_{base.name}").rename(tmp_path / f"merged_{version}")
    marked = UNSLOTH | {"lora_B_layout": "grouped_by_expert"}
    adapter, deltas = fused(base, tmp_path / "unsloth", True, True, **marked)
    check(base, adapter, changed_by(base, deltas), tmp_path)


@pytest.mark.parametrize("layout", ["before_0.19", "by_expert", "chosen", "transformers_4"])
def test_verify_shares_no_mistake_of_the_reader(bases, adapters, layout, tmp_path, monkeypatch):
    """With experts mixed up, or a wrong scale, merge and PEFT's form are wrong in the same way."""
    base = bases("qwen3_moe")
    if layout == "transformers_4":
        tensors, _ = on_linears(base, SEVEN)
        adapter = write(tmp_path / "adapter", {"target_modules": SEVEN}, tensors)
    elif layout == "chosen":
        chosen = {1: [9, 2, 5], 2: [0, 11]}
        adapter = helpers.select(adapters("qwen3_moe"), base, chosen, tmp_path / "adapter")
    else:
        old = layout == "before_0.19"
        config = {"peft_version": "0.18.1"} if old else {"lora_B_layout": "grouped_by_expert"}
        adapter, _ = fused(base, tmp_path / "adapter", not old, old, **config)
    merge_adapter(base, adapter, tmp_path / "right")
    verify_merge(base, adapter, tmp_path / "right")
    by_name = open_adapter.targets_by_name

    def twice(*args):
        targets, expected = by_name(*args)
        return [replace(target, scale=2 * target.scale) for target in targets], expected

    monkeypatch.setattr(open_adapter, "as_a", lambda vectors: as_a(vectors.roll(1, 0)))
    monkeypatch.setattr(open_adapter, "targets_by_name", twice)
    merge_adapter(base, adapter, tmp_path / "wrong")
    with pytest.raises(NumericsError, match=r"report (this as )?a bug"):
        verify_merge(base, adapter, tmp_path / "wrong")


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (UNSLOTH, 'Add "lora_B_layout": "grouped_by_expert"'),
        (UNSLOTH | {"lora_B_layout": "by_rank"}, "lora_B_layout is 'by_rank'"),
        ({"unsloth_fused_expert_lora": {}}, "Unsloth made this adapter"),
    ],
)
def test_a_packing_that_nobody_can_tell_is_refused(bases, config, part, tmp_path, capsys):
    base = bases("qwen3_moe")
    adapter, _ = fused(base, tmp_path / "adapter", True, False, **config)
    command = ["merge", str(adapter), "--base", str(base), "--output", str(tmp_path / "out")]
    assert main(command) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert part in shown and "adapter_config.json" in shown
    assert not (tmp_path / "out").exists()


def test_attention_of_unsloth_has_no_packing(bases, tmp_path):
    base = bases("qwen3_moe")
    a, b = torch.randn(RANK, 192), torch.randn(128, RANK)
    tensors = {}
    for layer in range(3):
        path = f"model.layers.{layer}.self_attn.q_proj"
        tensors |= {f"{path}.lora_A.weight": a + layer, f"{path}.lora_B.weight": b - layer}
    adapter = write(tmp_path / "adapter", UNSLOTH, tensors)
    merge_adapter(base, adapter, tmp_path / "merged")


def test_square_matrices_need_the_version(tmp_path):
    """Nothing else tells inputs from outputs."""
    base = tiny.save("mixtral", tmp_path / "mixtral", intermediate_size=192)
    for version, outputs_first in (("0.18.1", True), ("0.20.0", False)):
        adapter, deltas = fused(
            base, tmp_path / version, False, outputs_first, peft_version=version
        )
        merge_adapter(base, adapter, tmp_path / f"merged_{version}")
        same(logits(helpers.load(tmp_path / f"merged_{version}")), changed_by(base, deltas))
        # The shapes of the stack that is not square tell a wrong version.
        wrong, _ = fused(
            base, tmp_path / f"not_{version}", False, not outputs_first, peft_version=version
        )
        with pytest.raises(
            AdapterError, match="contradicts the tensors: the shapes of the experts"
        ):
            merge_adapter(base, wrong, tmp_path / "refused")
    adapter, _ = fused(base, tmp_path / "unknown", False, False)
    with pytest.raises(AdapterError, match="peft_version is missing"):
        merge_adapter(base, adapter, tmp_path / "refused")


def test_automodel_says_how_its_square_matrices_are_packed(tmp_path):
    """Its config for PEFT has no version; its own config, beside that one, names the packing."""
    base = tiny.save("mixtral", tmp_path / "mixtral", intermediate_size=192)
    for layout, outputs_first in (("peft-0.18", True), ("peft-0.19.1", False)):
        adapter, deltas = fused(base, tmp_path / layout, False, outputs_first)
        own = adapter / "automodel_peft_config.json"
        own.write_text(json.dumps({"paramwrapper_layout": layout, "moe_rank_scaling": False}))
        merge_adapter(base, adapter, tmp_path / f"merged_{layout}")
        same(logits(helpers.load(tmp_path / f"merged_{layout}")), changed_by(base, deltas))
        verify_merge(base, adapter, tmp_path / f"merged_{layout}")
    own.write_text(json.dumps({"paramwrapper_layout": "peft-0.30"}))
    with pytest.raises(AdapterError, match=r"peft-0\.30") as raised:
        merge_adapter(base, adapter, tmp_path / "refused")
    assert str(own) in str(raised.value)
    assert '"peft_version"' in str(raised.value)


@pytest.mark.parametrize("version", ["0.17.1", "0.18.1", "0.19.1"])
def test_granite_s_stacks_of_transformers_4(version, tmp_path):
    """PEFT adapted them as parameters, under their names in the files."""
    base = tmp_path / "granitemoe"
    tiny_families.model("granitemoe").save_pretrained(base)
    torch.manual_seed(3)
    stored = load_file(base / "model.safetensors")
    tensors, changed = {}, dict(stored)
    for name, value in stored.items():
        if value.ndim != 3:
            continue
        experts, rows, columns = value.shape
        outputs_first = version != "0.19.1"
        ends = (rows, columns) if outputs_first else (columns, rows)
        a, b = torch.randn(experts * RANK, ends[0]), torch.randn(ends[1], experts * RANK) * 0.02
        each = [SCALE * b[:, e::experts] @ a[e * RANK : (e + 1) * RANK] for e in range(experts)]
        changed[name] = value + torch.stack([d.T if outputs_first else d for d in each])
        path = name.removesuffix(".weight")
        tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    config = {
        "target_modules": [],
        "target_parameters": ["input_linear.weight", "output_linear.weight"],
        **({"peft_version": version} if version != "0.17.1" else {}),
    }
    assert len(tensors) == 4 * tiny_families.LAYERS
    adapter = write(tmp_path / "adapter", config, tensors)
    merge_adapter(base, adapter, tmp_path / "merged")
    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(tensor, changed[name], rtol=1e-5, atol=1e-5)
    check(base, adapter, logits(helpers.load(tmp_path / "merged")), tmp_path)
    del tensors[next(key for key in tensors if "output_linear.lora_B" in key)]
    incomplete = write(tmp_path / "incomplete", config, tensors)
    with pytest.raises(AdapterError, match="missing"):
        merge_adapter(base, incomplete, tmp_path / "refused")


def test_factors_of_the_biases_of_stacks(tmp_path):
    """gpt-oss's stacks have their inputs first, their biases (E, O) are ordinary matrices."""
    base, adapter = tmp_path / "gpt_oss", tmp_path / "adapter"
    model = tiny_families.model("gpt_oss")
    model.save_pretrained(base)
    targets = ["mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj"]
    peft = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, target_parameters=targets))
    helpers.randomize(peft, 3, 0.05)
    peft.save_pretrained(adapter)
    merge_adapter(base, adapter, tmp_path / "merged")
    assert verify_merge(base, adapter, tmp_path / "merged").layers
    wanted, merged = peft.merge_and_unload(), helpers.load(tmp_path / "merged")
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], tensor, rtol=1e-5, atol=1e-5)
