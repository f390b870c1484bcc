"""Analysis and selection on every kind of family."""

import warnings

import numpy as np
import pytest
import torch

from moe_finetune.lora.select import ExpertSelection, select_experts
from moe_finetune.lora.targets import add_lora
from moe_finetune.models import FAMILIES
from moe_finetune.moe.experts.lora_on_chosen import SelectedExpertsLora
from moe_finetune.moe.recorder.observe import observed
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.routing.trace import RoutingTrace
from moe_finetune.routing.tracing import trace_model
from moe_finetune.training.self_test.family_check import watch
from tests.families.cases import EACH_KIND
from tests.support import tiny_families as tiny


@pytest.mark.parametrize("family", EACH_KIND)
def test_analysed_and_selected(family, tmp_path):
    model, facts = tiny.model(family), FAMILIES[family]
    where = facts.places(model.config)
    layers = where.moe_layers
    ids_BT = torch.randint(4, 260, (3, 17), generator=torch.Generator().manual_seed(5))
    texts = {"prose": list(ids_BT[:2].numpy()), "code": [ids_BT[2].numpy()]}
    measures = trace_model(model, texts, tmp_path / "trace", checkpoint=family, norms=True)
    trace = RoutingTrace.open(tmp_path / "trace")
    index_TLK, weights_TLK = trace.load("ids").astype(np.int64), trace.load("weights")
    assert trace.info.layers == layers and trace.info.model_type == facts.model_type
    stock = torch.stack([index_TK for index_TK, _ in watch(model)], 1)
    assert np.array_equal(np.sort(index_TLK), stock.sort(-1).values.numpy())
    check_norms(model, trace, ids_BT)
    values = measures.per_layer()
    assert all(value is not None for value in values["entropy"] + values["router_cosine"])
    assert ("gate_norm_mean" in values) == where.gated

    chosen = select_experts(index_TLK, weights_TLK, tiny.EXPERTS, top_p=0.3)
    experts = dict(zip(layers, chosen, strict=True))
    file = tmp_path / "selection.json"
    ExpertSelection(experts, trace.info.model_type, tiny.EXPERTS).write(file)
    section = LoraSection(rank=4, alpha=12.0, targets=["experts"], experts=str(file))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = add_lora(tiny.model(family), section, "frozen")
    wrappers = [m for m in adapted.modules() if isinstance(m, SelectedExpertsLora)]
    assert len(wrappers) == 2 * len(layers)
    assert {w.num_experts for w in wrappers} == {len(ids) for ids in chosen}
    trained = {n for n, p in adapted.named_parameters() if p.requires_grad}
    assert all(f"{where.backbone}.layers." in name for name in trained)


def check_norms(model, trace, ids_BT):
    """The lengths are those of each selected expert's output, before its weight."""
    lengths = []

    def keep(record, _):
        lengths.append(record.outputs_TKH.norm(dim=-1))

    with observed(model, keep, frozenset({"outputs"})), torch.no_grad():
        model(input_ids=ids_BT, use_cache=False)
    expected = torch.stack(lengths, 1)
    stored = torch.from_numpy(trace.load("norms"))
    assert trace.info.groups is not None and float(expected.std()) > 1e-3
    torch.testing.assert_close(stored, expected, atol=1e-4 * float(expected.max()), rtol=1e-3)
