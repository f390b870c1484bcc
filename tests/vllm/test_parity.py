"""Families, base + adapter merged, in real vLLM: the tokens and log-probabilities of base +
adapter in transformers. Those that are published with an MTP head have one here, too. The plugin
and its mending of rotary positions act through their entry point. One process serves all
checkpoints in turn."""

import pytest
import torch

from moe_finetune.checkpoint.convert_checkpoint import convert_checkpoint
from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.sections import LoraSection
from tests.support import tiny, tiny_families, tiny_heads, vllm_server
from tests.vllm.families import SERVED, TESTED

MAX_TOKENS = 64


def _prompts() -> list[list[int]]:
    """Eight prompts of unequal length; together more than one page of the key-value cache.

    With this seed no family has two experts so close that rounding (2e-6 of the embeddings) decides
    between them, which seed 5 did in three.
    """
    generator = torch.Generator().manual_seed(7)
    lengths = (1, 8, 13, 21, 5, 34, 17, 29)
    return [torch.randint(4, 260, (n,), generator=generator).tolist() for n in lengths]


def _adapted(base):
    """Base with a random adapter on attention, shared and routed experts, and full routers."""
    model = add_lora(load_model(base), LoraSection(rank=4, alpha=8.0), "full").eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def _base(family, folder, tiny_checkpoint):
    if family in tiny_heads.HEADS:  # which vLLM leaves aside, too
        tiny_heads.with_head(family, folder, **SERVED.get(family, {}))
    elif family in tiny.FAMILY_NAMES:
        return convert_checkpoint(tiny_checkpoint(family), folder)
    else:
        tiny_families.model(family, **SERVED[family]).save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(warm_vllm, tiny_checkpoint, tmp_path_factory):
    """Model with adapter, and vLLM's completions of the merged checkpoint, by family."""
    models, merged = {}, []
    for family in TESTED:
        folder = tmp_path_factory.mktemp(family)
        base = _base(family, folder / "base", tiny_checkpoint)
        models[family] = _adapted(base)
        models[family].save_pretrained(folder / "adapter")
        merge_adapter(base, folder / "adapter", folder / "merged")
        merged.append(folder / "merged")
    found = vllm_server.complete_each(merged, _prompts(), MAX_TOKENS)
    return {family: (models[family], each) for family, each in zip(TESTED, found, strict=True)}


@pytest.mark.slow
@pytest.mark.vllm
@vllm_server.needs_vllm
@pytest.mark.parametrize("family", TESTED)
def test_vllm_on_merged_gives_the_tokens_of_base_and_adapter(family, served):
    model, completions = served[family]
    assert not isinstance(completions, str), completions
    assert len({token for row in completions for token in row.tokens}) > 30  # not a stuck model
    for prompt, completion in zip(_prompts(), completions, strict=True):
        assert len(completion.tokens) == MAX_TOKENS
        with torch.no_grad():
            ids = torch.tensor([prompt + completion.tokens])
            logits = model(input_ids=ids, use_cache=False).logits[0]
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == completion.tokens
        got = torch.tensor(completion.logprobs)
        expected = logprobs.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(got, expected, atol=5e-5, rtol=5e-5)
