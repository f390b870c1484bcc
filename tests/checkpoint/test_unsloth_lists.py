"""The adapter of Unsloth's 4-bit gpt-oss: a list of modules for each projection of the experts.

Names and the order of rows as in unsloth-zoo (``temporary_patches/gpt_oss.py``: ``gate_up_projs``,
whose outputs are split as ``[..., ::2]`` and ``[..., 1::2]``).
"""

import json

import pytest
import torch

from moe_finetune.checkpoint.adapters.convert import convert_adapter
from moe_finetune.checkpoint.adapters.forms import FORMS
from moe_finetune.checkpoint.adapters.open_adapter import open_adapter
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.cli import main
from moe_finetune.errors import AdapterError
from tests.support.maker_formulas import RANK, Experts, peft_config, save


def lists(experts):
    """A pair for each expert of a list; of gate and up, their rows alternate."""
    tensors = experts.attention_tensors()
    for layer, path in experts.paths.items():
        (a, gate_b), (_, up_b) = (experts.factors[layer, role] for role in ("gate", "up"))
        down_a, down_b = experts.factors[layer, "down"]
        for expert in range(experts.total):
            rows = torch.stack([gate_b[expert], up_b[expert]], 1).flatten(0, 1)
            for name, factor_a, factor_b in (
                ("gate_up_projs", a[expert], rows),
                ("down_projs", down_a[expert], down_b[expert]),
            ):
                key = f"{path}.{name}.{expert}.lora"
                tensors |= {f"{key}_A.weight": factor_a, f"{key}_B.weight": factor_b}
    targets = ["q_proj", "o_proj", "gate_up_projs", "down_projs"]
    return tensors, peft_config(experts) | {"target_modules": targets}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return Experts(
        "gpt_oss", base=tmp_path_factory.mktemp("lists") / "base", shared=False, common_a=True
    )


def test_a_list_for_each_projection_is_merged_by_its_own_rows(experts, tmp_path, capsys):
    adapter = save(tmp_path / "adapter", *lists(experts))
    assert main(["inspect", str(adapter), "--base", str(experts.base)]) == 0
    shown = capsys.readouterr().out
    assert "Unsloth" in shown and "unsloth-lists" in shown, shown
    merge_adapter(experts.base, adapter, tmp_path / "merged")
    verify_merge(experts.base, adapter, tmp_path / "merged")
    convert_adapter(adapter, experts.base, tmp_path / "peft", FORMS["peft"])

    from peft import PeftModel

    kind = type(experts.model)
    plain = kind.from_pretrained(experts.base, dtype=torch.float32)
    stock = PeftModel.from_pretrained(plain, tmp_path / "peft").merge_and_unload().state_dict()
    merged = kind.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    for key, tensor in experts.change_model().state_dict().items():
        torch.testing.assert_close(merged[key], tensor, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(stock[key], tensor, rtol=1e-5, atol=1e-5)


def test_an_expert_that_a_list_lacks_is_named(experts, tmp_path):
    tensors, config = lists(experts)
    dropped = f"{experts.paths[1]}.down_projs.4.lora_A.weight"
    del tensors[dropped]
    adapter = save(tmp_path / "adapter", tensors, config)
    with pytest.raises(AdapterError, match="missing") as raised:
        open_adapter(adapter, open_checkpoint(experts.base))
    assert dropped in str(raised.value) and str(adapter) in str(raised.value)


def test_rows_in_another_order_make_another_model(experts, tmp_path):
    """An order that the config states is taken, so the merge by the model's own is a choice."""
    tensors, config = lists(experts)
    own = save(tmp_path / "own", tensors, config)
    halves = save(tmp_path / "halves", tensors, config | {"gate_up_rows": "halves"})
    assert json.loads((own / "adapter_config.json").read_text())["r"] == RANK
    opened = [open_adapter(folder, open_checkpoint(experts.base)) for folder in (own, halves)]
    key = next(u.b for u in opened[0].low_rank if u.name.endswith("gate_up_proj"))
    own_b, halves_b = (adapter.tensors[key].make() for adapter in opened)
    assert not torch.equal(own_b, halves_b)
