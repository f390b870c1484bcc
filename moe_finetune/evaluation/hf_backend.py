"""transformers as an lm-eval model that reads replies as vLLM's backend does."""

from __future__ import annotations

from typing import Any

from lm_eval.models.huggingface import HFLM


class SpecialsKeptHFLM(HFLM):
    """lm-eval's transformers model, with special tokens kept in replies up to the end of text.

    lm-eval drops special tokens from transformers' replies and keeps them in vLLM's; a model that
    writes ``<|im_start|>`` would get two different texts for the same tokens.
    """

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        """Decode ``tokens`` up to the first end-of-text token."""
        if isinstance(tokens, list):
            ends = self.model.generation_config.eos_token_id
            ends = set(ends if isinstance(ends, list) else [ends])
            stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
            tokens = tokens[:stop]
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
