"""Pruned checkpoints in real vLLM: transformers' tokens and log-probabilities."""

import pytest
import torch

from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.prune import prune_experts
from tests.support import tiny, tiny_families, vllm_server
from tests.vllm.families import SERVED

MAX_TOKENS = 32
KEPT = {"qwen3_moe": 8, "deepseek_v3": 9, "glm4_moe": 8}
"""Experts of each layer that stay: of stacks or single experts, with a bias, and in groups."""


def _prompts():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, 260, (n,), generator=generator).tolist() for n in (1, 8, 13, 34)]


def _pruned(family, folder, tiny_checkpoint):
    base = folder / "base"
    if family in tiny.FAMILY_NAMES:
        base = tiny_checkpoint(family)
    else:
        tiny_families.model(family, **SERVED[family]).save_pretrained(base)
        tiny.tokenizer().save_pretrained(base)
    groups = 2 if family == "glm4_moe" else 1
    kept = {}
    for layer, total in open_checkpoint(base).experts.items():
        size, count = total // groups, KEPT[family] // groups
        first = layer % (size - count + 1)
        kept[layer] = [g * size + first + e for g in range(groups) for e in range(count)]
    prune_experts(base, kept, folder / "pruned")
    return folder / "pruned"


@pytest.mark.slow
@pytest.mark.vllm
@vllm_server.needs_vllm
def test_vllm_on_pruned_gives_the_tokens_of_transformers(
    warm_vllm, tiny_checkpoint, tmp_path_factory
):
    folders = {f: _pruned(f, tmp_path_factory.mktemp(f), tiny_checkpoint) for f in KEPT}
    answers = vllm_server.complete_each(list(folders.values()), _prompts(), MAX_TOKENS)
    for (family, folder), completions in zip(folders.items(), answers, strict=True):
        assert not isinstance(completions, str), completions
        model = load_model(folder)
        for prompt, completion in zip(_prompts(), completions, strict=True):
            with torch.no_grad():
                ids = torch.tensor([prompt + completion.tokens])
                logits = model(input_ids=ids, use_cache=False).logits[0]
            logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
            assert logprobs.argmax(-1).tolist() == completion.tokens, family
            expected = logprobs.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
            got = torch.tensor(completion.logprobs)
            torch.testing.assert_close(got, expected, atol=5e-5, rtol=5e-5)
