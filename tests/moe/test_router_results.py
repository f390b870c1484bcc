"""A router's results are told by dtype, shape and declared name, in every version's order."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from moe_finetune.errors import CaptureError
from moe_finetune.models import FAMILIES
from moe_finetune.moe.experts.lora_factors import stored_router_weight
from moe_finetune.moe.layers import moe_layers
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.moe.recorder.router_results import STANDARD, named_results
from moe_finetune.training.self_test.family_check import batch, watch
from tests.support import tiny, tiny_families

E, K, T = 8, 3, 5
LOGITS, SHARED = torch.zeros(T, E), torch.zeros(T, 2)
WEIGHTS, INDEX = torch.zeros(T, K), torch.zeros(T, K, dtype=torch.long)
REVERSED = ("index", "weights", "logits")
GEMMA = ("probabilities", "weights", "index")


@pytest.mark.parametrize("declared", [STANDARD, REVERSED, ("logits",)])
@pytest.mark.parametrize("all_experts", [False, True], ids=["K < E", "K = E"])
def test_an_order_is_told_by_its_integers(declared, all_experts):
    """5.21: Granite's, Aria's and Jamba's routers return what the others do."""
    index = torch.zeros(T, E, dtype=torch.long) if all_experts else INDEX
    logits, weights = torch.zeros(T, E), torch.zeros(index.shape)
    named = named_results(declared, (logits, weights, index), E)
    assert named is not None and list(named) == list(STANDARD)
    assert named["logits"] is logits and named["weights"] is weights and named["index"] is index
    if declared == REVERSED:
        named = named_results(declared, (index, weights, logits), E)
        assert named is not None and named["logits"] is logits and named["index"] is index


@pytest.mark.parametrize(
    ("declared", "results"),
    [
        (STANDARD, (INDEX, WEIGHTS, LOGITS)),  # a reverse order that nobody declared
        (STANDARD, (LOGITS, WEIGHTS)),
        (STANDARD, (LOGITS, WEIGHTS, WEIGHTS)),
        (STANDARD, (WEIGHTS, LOGITS, INDEX)),
        (STANDARD, (LOGITS, SHARED, INDEX)),
        (("logits",), (SHARED,)),
        (("logits",), (LOGITS, LOGITS)),
        ((*STANDARD, "shared weights"), (LOGITS, WEIGHTS, SHARED, INDEX)),
        (STANDARD, (LOGITS, WEIGHTS, None)),
    ],
)
def test_what_does_not_fit_is_refused(declared, results):
    assert named_results(declared, results, E) is None


def test_names_decide_where_dtypes_and_shapes_do_not():
    named = named_results(GEMMA, (LOGITS, WEIGHTS, INDEX), E)
    assert named is not None and "logits" not in named and named["probabilities"] is LOGITS
    shared = torch.zeros(T, K)  # as many as are selected
    named = named_results((*STANDARD, "shared weights"), (LOGITS, WEIGHTS, INDEX, shared), E)
    assert named is not None and named["weights"] is WEIGHTS and named["shared weights"] is shared


@pytest.mark.parametrize(
    "name",
    [
        *("aria", "aria_text", "gemma4", "gemma4_text", "gpt_oss", "granitemoe", "inkling_text"),
        *("granitemoehybrid", "granitemoeshared", "jamba", "olmoe"),
    ],
)
def test_a_record_has_the_router_s_own_tensors(name):
    """On whichever version is installed; z-loss or entropy of probabilities would be wrong."""
    model = (tiny if name in tiny.FAMILY_NAMES else tiny_families).model(name)
    outputs, records = [], []
    for layer in moe_layers(model):
        path = FAMILIES[name].router_logits
        router = layer.router.get_submodule(path) if path else layer.router

        def note(module, args, output, layer=layer):
            weight = stored_router_weight(layer.router, layer.places.router_weight)
            bias = getattr(layer.router, "bias", None)
            bias = bias if isinstance(bias, nn.Parameter) and name == "gpt_oss" else None
            hidden = args[0].reshape(-1, args[0].shape[-1]).to(weight.dtype)
            outputs.append(linear(hidden, weight, bias))

        router.register_forward_hook(note)
    routings = watch(model)
    outputs.clear()
    with Recorder(model, observers=[lambda r, _: records.append(r)], observe="all"):
        model(**batch(model))
    assert len(records) == len(outputs) == len(routings) > 1
    for record, logits, (index_TK, weights_TK) in zip(records, outputs, routings, strict=True):
        experts = record.logits_TE.shape[1]
        torch.testing.assert_close(record.logits_TE, logits[:, :experts].float())
        assert torch.equal(record.index_TK, index_TK)
        torch.testing.assert_close(record.weights_TK.float(), weights_TK)


def test_a_router_that_returns_something_else_is_refused():
    model = tiny.model("olmoe")
    model.model.layers[1].mlp.gate.register_forward_hook(lambda module, args, output: output[:2])
    with (
        Recorder(model, observers=[lambda *_: None], observe="all"),
        pytest.raises(
            CaptureError, match=r"layer 1: the router of this OLMoE.* returns \(.*12.*\)"
        ),
    ):
        model(**tiny.batch())
