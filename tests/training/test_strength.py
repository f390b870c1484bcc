"""Measured strength equals a separate backward of each loss by hand, however training is run."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import Trainer, TrainingArguments

from moe_finetune import SpecializationCallback, measure_strength
from moe_finetune.capture.model import model_facts, moe_layers
from moe_finetune.capture.recorder import Recorder
from moe_finetune.errors import ObjectiveError
from moe_finetune.lora.targets import add_lora
from moe_finetune.losses.base import LayerContext, PreviousLayer
from moe_finetune.losses.objective import Objective
from moe_finetune.sections import LoraSection
from moe_finetune.training.specialization import Specialization
from tests import tiny

TERMS = {
    "load_balance": {"weight": 0.3, "scope": "sequence"},
    "z_loss": {"weight": 0.02},
    "orthogonality": {"weight": 0.5, "reduction": "sum", "tokens": 41},
    "variance": {"weight": 0.7, "layers_reduction": "mean"},
    "specialization": {"weight": 0.4},
    "coupling": {"weight": 0.2},
    "erc": {"weight": 0.3, "noise": False},
    "router_orthogonality": {"weight": 0.6, "layers": [1]},
    "dpp": {"weight": 0.2},
    "ncl": {"weight": 0.1},
    "supervised_routing": {"weight": 0.1},
}
BATCHES = (tiny.batch(seed=1), tiny.batch(rows=2, length=23, seed=2))


def adapted(family="qwen3_moe", **changes):
    torch.manual_seed(1)
    model = add_lora(tiny.model(family, **changes), LoraSection(rank=4, alpha=12.0), "full")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    return model


@pytest.fixture
def terms(tmp_path):
    path = tmp_path / "table.safetensors"
    save_file({"token_frequencies": torch.randn(tiny.VOCABULARY, 12).softmax(-1)}, path)
    return {**TERMS, "supervised_routing": {"weight": 0.1, "table": str(path)}}


def by_hand(model, terms, batches):
    """Rows from ``torch.autograd.grad`` of the language loss and of each term's explicit sum."""
    model.train()
    objective = Objective.from_options(terms, model_facts(model))
    layers = moe_layers(model)
    parts = {
        "router": [p for x in layers for p in x.router.parameters() if p.requires_grad],
        "experts": [p for x in layers for p in x.outer_experts.parameters() if p.requires_grad],
    }
    learned = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    sums = {name: {part: 0.0 for part in parts} for name in ("language", *terms)}

    def add(name, loss):
        for part, own in parts.items():
            grads = torch.autograd.grad(loss, own, retain_graph=True, allow_unused=True)
            flat = [torch.zeros_like(p) if g is None else g for p, g in zip(own, grads)]
            sums[name][part] = sums[name][part] + torch.cat([g.flatten() for g in flat]).double()

    for batch in batches:
        totals, below = {}, []

        def observer(record, _, totals=totals, below=below):
            context = LayerContext(previous=below[-1] if below else None)
            with torch.enable_grad():
                for term in objective.terms:
                    if not term.options.selects(record.layer):
                        continue
                    value = term.loss(record, context)
                    if value is not None:
                        totals[term.name] = totals.get(term.name, 0.0) + value
            below.append(PreviousLayer(record.layer, record.distribution_TE, record.index_TK))

        with Recorder(model, observers=[observer], needs=objective.needs):
            tokens = int((batch["labels"][:, 1:] != -100).sum())
            add("language", model(**batch).loss * (tokens / learned))
            for term in objective.terms:
                options = term.options
                count = sum(options.selects(x.index) for x in layers)
                scale = options.weight * (options.tokens or 1) / len(batches)
                scale /= count if options.layers_reduction == "mean" else 1
                add(term.name, totals[term.name] * scale)
    rows = {}
    for name in terms:
        row = rows[name] = {}
        for part in parts:
            own, language = sums[name][part], sums["language"][part]
            row[f"share_{part}"] = float(own.norm() / language.norm())
            both = own.norm() * language.norm()
            row[f"cosine_{part}"] = float(own @ language / both) if both else 0.0
    return rows


def agree(rows, wanted, rel=1e-4):
    assert [row["term"] for row in rows] == list(wanted)
    for row in rows:
        for key, value in wanted[row["term"]].items():
            assert row[key] == pytest.approx(value, rel=rel, abs=1e-7), (row["term"], key)


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_measured_strength_is_a_separate_backward_of_each_loss(family, terms):
    model = adapted(family).eval()
    names = {name for name, _ in model.named_parameters()}
    before = torch.get_rng_state()
    rows = measure_strength(model, {"terms": terms}, BATCHES)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters()) and not model.training
    assert names == {name for name, _ in model.named_parameters()}
    agree(rows, by_hand(model, terms, BATCHES))
    for row in rows:
        mainly = {"router": row["share_router"], "experts": row["share_experts"]}
        assert max(mainly.values()) > 0
        assert row["weight"] == terms[row["term"]]["weight"]
