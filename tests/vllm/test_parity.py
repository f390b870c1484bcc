"""Every family, base + adapter merged, in real vLLM: the tokens and log-probabilities of base +
adapter in transformers. The plugin and its mending of rotary positions act through their entry
point."""

from __future__ import annotations

import pytest
import torch

from moe_finetune.checkpoint import merge_adapter
from moe_finetune.checkpoint.convert import convert_checkpoint
from moe_finetune.checkpoint.loading import load_model
from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.sections import LoraSection
from tests import tiny, vllm_server

MAX_TOKENS = 64


def _prompts() -> list[list[int]]:
    """Eight prompts of unequal length; together more than one page of the key-value cache."""
    generator = torch.Generator().manual_seed(5)
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


@pytest.mark.slow
@pytest.mark.vllm
@vllm_server.needs_vllm
@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_vllm_on_merged_gives_the_tokens_of_base_and_adapter(family, tiny_checkpoint, tmp_path):
    base = convert_checkpoint(tiny_checkpoint(family), tmp_path / "base")
    model = _adapted(base)
    model.save_pretrained(tmp_path / "adapter")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    prompts = _prompts()
    completions = vllm_server.complete(tmp_path / "merged", prompts, MAX_TOKENS)

    assert len({token for row in completions for token in row.tokens}) > 50  # not a stuck model
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.tokens) == MAX_TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.tokens])).logits[0]
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == completion.tokens
        got = torch.tensor(completion.logprobs)
        expected = logprobs.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(got, expected, atol=5e-5, rtol=0)
