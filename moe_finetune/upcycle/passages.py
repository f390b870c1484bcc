"""Texts whose tokens carry the expert that weighs most in the middle MoE layer (P3 Fig. 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from moe_finetune.upcycle.texts import Texts

TOKENS = 120


def passages(model: Any, tokenizer: Any, texts: Texts, count: int) -> list[dict[str, Any]]:
    """The beginning of ``count`` test texts of different categories, as the report colours them.

    Each has ``category``, ``layer``, ``tokens`` (their text) and ``experts``.
    """
    import torch

    from moe_finetune.metrics import top_choice
    from moe_finetune.moe.hooks import Recorder
    from moe_finetune.moe.layers import model_facts

    layers = model_facts(model).moe_layers
    middle = len(layers) // 2
    records: list[Any] = []
    chosen = np.linspace(0, len(texts.categories) - 1, count).round().astype(int)
    found = []
    with (
        torch.no_grad(),
        Recorder(model, observers=[lambda r, _: records.append(r)], observe="all"),
    ):
        for category in dict.fromkeys(chosen.tolist()):
            ids_T = texts.windows("test", category, TOKENS)[0]
            records.clear()
            model(input_ids=torch.from_numpy(ids_T.astype(np.int64))[None], use_cache=False)
            found.append(
                {
                    "category": texts.categories[category],
                    "layer": layers[middle],
                    "tokens": [tokenizer.decode([int(i)]) for i in ids_T],
                    "experts": top_choice(
                        records[middle].index_TK.numpy(), records[middle].scores_TK.numpy()
                    ).tolist(),
                }
            )
    return found
