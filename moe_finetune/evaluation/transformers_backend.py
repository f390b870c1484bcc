"""transformers as an lm-eval model that decodes replies like vLLM's backend."""

import logging
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import nn

from moe_finetune.checkpoint.adapters.in_peft import with_adapter
from moe_finetune.checkpoint.adapters.updates import OpenAdapter
from moe_finetune.checkpoint.dense_checkpoint import DenseCheckpoint
from moe_finetune.checkpoint.load_model import forget_generation_defaults, load_model
from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.checkpoint.tokenizer_files import reply_ends
from moe_finetune.io.environment import package_versions
from moe_finetune.moe.layers import family_in
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.routing.tracing_checkpoint import stored_bias

log = logging.getLogger(__name__)


class SpecialsKeptHFLM(HFLM):
    """lm-eval's transformers model, with special tokens kept in replies up to the end of text.

    lm-eval drops special tokens from transformers' replies and keeps them in vLLM's, so that the
    same tokens, such as ``<|im_start|>``, would give two texts.
    """

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        """Decode ``tokens`` up to the first end-of-text token."""
        if isinstance(tokens, list):
            ends = reply_ends(self.tokenizer, self.model.generation_config.eos_token_id)
            stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
            tokens = tokens[:stop]
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)


def open_transformers(
    base: Checkpoint | DenseCheckpoint,
    adapter: OpenAdapter | None,
    batch_size: int | str,
    dtype: str,
    seed: int,
) -> tuple[SpecialsKeptHFLM, dict[str, Any], Recorder | None]:
    """Load ``base``, opened with its values, with ``adapter`` and its routing bias on top.

    Returns lm-eval's model, all settings that can change a reply, and the hooks of the bias.
    """
    cuda = torch.cuda.is_available()
    device, routing = "cuda" if cuda else None, None
    if isinstance(base, DenseCheckpoint):
        model: nn.Module = base.load(dtype, device)
    else:
        model = load_model(base, dtype=dtype, device_map=device)
    if adapter is not None:
        model = with_adapter(model, adapter)
        bias = stored_bias(model, adapter.folder)
        if bias is not None:
            routing = Recorder(model, perturbation=bias)
            routing.install()
    family = None if isinstance(base, DenseCheckpoint) else family_in(model)
    if family is not None and not family.rows.generates_padded and batch_size != 1:
        log.warning(
            "transformers' %s computes wrong logits for a prompt that is padded on the left: "
            "prompts run one by one, which is slower",
            family.title,
        )
        batch_size = 1
    if batch_size == "auto" and not cuda:
        batch_size = 16  # lm-eval's search for the largest batch exhausts a machine without GPU
    lm = SpecialsKeptHFLM(
        pretrained=model, tokenizer=str(base.folder), batch_size=batch_size, trust_remote_code=False
    )
    # A checkpoint's generation defaults (repetition penalty, temperature) must not change a task.
    forget_generation_defaults(model, lm.tokenizer.pad_token_id)
    return (
        lm,
        {
            "backend": "hf",
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "batch_size": batch_size,
            "seed": seed,
            "max_length": lm.max_length,
            "versions": package_versions("lm-eval", "transformers", "torch"),
        },
        routing,
    )
