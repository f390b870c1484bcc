"""Adapters of other programs in real vLLM: merged, what it answers; in the shared-outer form, what
its own loader reads (its CPU build runs no MoE model with an adapter on)."""

import pytest
import torch

from moe_finetune.checkpoint.adapters.convert import convert_adapter
from moe_finetune.checkpoint.adapters.files import read_adapter
from moe_finetune.checkpoint.adapters.forms import FORMS
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.weight_files import read_tensor
from tests.support import tiny, vllm_server
from tests.support.maker_formulas import ALPHA, MAKERS, RANK, Experts, save, tinker

pytestmark = [pytest.mark.vllm, vllm_server.needs_vllm]
PROMPTS = [[5, 77, 31, 240, 8], [19], [200, 3, 64, 64, 129, 7, 51]]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def served(warm_vllm, tmp_path_factory):
    """By maker, the model by the maker's formula, and vLLM's completions of the merge."""
    models, merged = {}, []
    for maker, (write, options) in MAKERS.items():
        folder = tmp_path_factory.mktemp("maker")
        experts = Experts("olmoe", base=folder / "base", **options)
        tiny.tokenizer().save_pretrained(experts.base)
        adapter = save(folder / "adapter", *write(experts))
        merge_adapter(experts.base, adapter, folder / "merged")
        models[maker] = experts.change_model()
        merged.append(folder / "merged")
    found = vllm_server.complete_each(merged, PROMPTS, MAX_TOKENS)
    return {maker: (models[maker], each) for maker, each in zip(MAKERS, found, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("maker", MAKERS)
def test_vllm_answers_by_the_maker_s_formula_after_a_merge(maker, served):
    model, completions = served[maker]
    assert not isinstance(completions, str), completions
    assert len({token for row in completions for token in row.tokens}) > 10  # not a stuck model
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert len(completion.tokens) == MAX_TOKENS
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion.tokens])).logits[0]
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        tokens = torch.tensor(completion.tokens)
        assert logprobs.argmax(-1).tolist() == completion.tokens
        expected = logprobs.gather(-1, tokens[:, None])[:, 0]
        found = torch.tensor(completion.logprobs)
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=5e-5)


def test_vllm_reads_the_shared_outer_form(tmp_path):
    """``--enable-moe-shared-loras``: a tensor for each projection, one entry where all share it."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import PackedLoRALayerWeights
    from vllm.lora.peft_helper import PEFTHelper

    experts = Experts("qwen3_moe", shared=True, base=tmp_path / "base", common_a=True)
    adapter = save(tmp_path / "adapter", *tinker(experts))
    peft = convert_adapter(adapter, experts.base, tmp_path / "peft", FORMS["peft"])
    out = convert_adapter(peft, experts.base, tmp_path / "out", FORMS["shared-outer"])
    helper = PEFTHelper.from_local_dir(str(out), None)
    expected = {"q_proj", "o_proj", "experts.w1", "experts.w2", "experts.w3"}
    loras = LoRAModel.from_local_checkpoint(
        str(out), expected, helper, device="cpu", dtype=torch.float32
    ).loras
    stored = {key: read_tensor(info) for key, info in read_adapter(out).tensors.items()}
    assert len(loras) == len(stored) / 2
    for layer, path in experts.paths.items():
        parts = [loras[f"{path}.{name}"] for name in ("w1", "w2", "w3")]
        packed = PackedLoRALayerWeights.pack_moe_stacked(parts, path)
        scales = [float(scale) for scale in packed.scaling]
        assert scales == [ALPHA / RANK] * 3
        for slot, role in enumerate(("gate", "down", "up")):
            a, b = experts.factors[layer, role]
            assert tuple(packed.lora_a[slot].shape) == tuple(a.shape)
            assert torch.equal(packed.lora_a[slot], a) and torch.equal(packed.lora_b[slot], b)
