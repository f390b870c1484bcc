"""Every family's tiny checkpoint, converted, in real vLLM: the tokens and log-probabilities of
transformers. The plugin and its mending of rotary positions act through their entry point."""

from __future__ import annotations

import pytest
import torch

from moe_finetune.families.convert import convert_checkpoint
from moe_finetune.families.loading import load_model
from tests import tiny, vllm_server

MAX_TOKENS = 64


def _prompts() -> list[list[int]]:
    """Eight prompts of unequal length; together more than one page of the key-value cache."""
    generator = torch.Generator().manual_seed(5)
    lengths = (1, 8, 13, 21, 5, 34, 17, 29)
    return [torch.randint(4, 260, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.slow
@pytest.mark.vllm
@vllm_server.needs_vllm
@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_vllm_gives_the_tokens_and_logprobs_of_transformers(family, tiny_checkpoint, tmp_path):
    folder = convert_checkpoint(tiny_checkpoint(family), tmp_path / "served")
    model = load_model(folder)
    prompts = _prompts()
    completions = vllm_server.complete(folder, prompts, MAX_TOKENS)

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
