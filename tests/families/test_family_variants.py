"""Families in other shapes than their tiny model's: one expert a token, ties, layers again."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models import FAMILIES
from moe_finetune.moe.layers import model_facts, moe_layers
from moe_finetune.moe.recorder.hooks import Recorder
from tests.families.cases import adapted, batch, run
from tests.support import tiny_families as tiny
from tests.support.objectives import objective_of

TERMS = {"orthogonality": {"weight": 0.1}, "variance": {"weight": 0.2}, "z_loss": {"weight": 0.05}}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("dots1", {"num_experts_per_tok": 1}),
        ("nemotron_h", {"moe_latent_size": None}),
        ("lfm2_moe", {"use_expert_bias": False, "tie_word_embeddings": True}),
        ("jamba", {"expert_layer_period": 3, "expert_layer_offset": 2}),
        ("glm4_moe", {"first_k_dense_replace": 2, "n_shared_experts": 1}),
        ("qwen2_moe", {"decoder_sparse_step": 2}),
        ("granitemoehybrid", {"tie_word_embeddings": True}),
        ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
        ("gemma4_text", {"tie_word_embeddings": True, "attention_k_eq_v": True}),
    ],
)
def test_recorded_and_saved_in_other_shapes(family, changes, tmp_path):
    model = tiny.model(family, **changes)
    with torch.no_grad():
        wanted = model(**batch()).logits
        with Recorder(model):
            recorded = model(**batch()).logits
    assert torch.allclose(wanted, recorded, rtol=0, atol=2e-6 * float(wanted.abs().max()))
    model.save_pretrained(tmp_path)
    opened = open_checkpoint(tmp_path)
    assert list(opened.experts) == list(model_facts(model).moe_layers)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        found = again(**batch()).logits
    assert torch.allclose(found, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    "family", ["deepseek_v4", "gemma4_text", "inkling_text", "jamba", "phimoe"]
)
def test_layers_that_run_again_give_the_same_gradients(family):
    found = []
    for again in (False, True):
        model = adapted(family).train()
        if again:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(7)
        with Recorder(model, objective_of(TERMS, model_facts(model))):
            found.append(run(model)[1])
    for name, grad in found[0].items():
        scale = float(grad.abs().max()) + 1e-6
        assert float((grad - found[1][name]).abs().max()) < 1e-4 * scale, name


def test_a_hybrid_without_experts_is_refused():
    dense = tiny.config("granitemoehybrid", num_local_experts=0)
    with pytest.raises(UnsupportedModelError, match=r"granitemoehybrid .* no layer with experts"):
        FAMILIES["granitemoehybrid"].places(dense)


def test_the_experts_of_a_hybrid_are_found_between_other_layers():
    assert [layer.index for layer in moe_layers(tiny.model("nemotron_h"))] == [1, 3, 5]
    assert [layer.index for layer in moe_layers(tiny.model("jamba"))] == [1, 3, 5]
