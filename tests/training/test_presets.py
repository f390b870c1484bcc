"""Every preset trains every family: its terms act, and without them the gradient is another."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from moe_finetune.lora.targets import add_lora
from moe_finetune.losses.presets import PRESETS
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.specialization import Specialization
from tests import tiny


def adapted(family):
    torch.manual_seed(0)
    model = add_lora(tiny.model(family), LoraSection(rank=4, alpha=8.0), "full").train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    return model


def gradients(model, options):
    """Of one step, which leaves the model as it was."""
    model.zero_grad()
    torch.manual_seed(1)
    with Specialization(model, options, dropout=0.1, total_steps=4) as method:
        torch.manual_seed(2)
        model(**tiny.batch()).loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        method.step()
        logged = method.read()
        biased = method.balancer is not None and any(
            bias.abs().max() > 0 for bias in method.balancer.bias.values()
        )
    return found, logged, method.reached, biased


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_presets(family, tmp_path):
    torch.manual_seed(5)
    table = torch.rand(tiny.VOCABULARY, 12).softmax(1)
    save_file({"token_frequencies": table}, tmp_path / "table.safetensors")
    model = adapted(family)
    plain, *_ = gradients(model, "none")
    for name, preset in PRESETS.items():
        options = preset.method()
        if "supervised_routing" in options["terms"]:
            options["terms"]["supervised_routing"]["table"] = str(tmp_path / "table.safetensors")
        got, logged, reached, biased = gradients(model, options)
        terms = {key.removeprefix("losses/") for key in logged if key.startswith("losses/")}
        assert terms == set(options["terms"]) == reached.keys(), name
        assert biased == (preset.bias_update is not None), name
        assert got.keys() == plain.keys()
        change = max((got[n] - plain[n]).abs().max().item() for n in plain)
        acts = bool(terms) or bool(preset.perturbations)
        assert (change > 1e-7) == acts, (name, change)
    again, *_ = gradients(model, "none")
    assert all(torch.equal(again[name], plain[name]) for name in plain)
