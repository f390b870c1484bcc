"""Texts whose tokens carry two experts (P3 Fig. 1): the chosen one and the one of their frequency.

The chosen expert weighs most in the middle MoE layer. The other is the one in whose training texts
the token occurs most often (Fig. 1c).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from moe_finetune.upcycle.texts import Texts

TOKENS = 120


def passages(
    model: Any, tokenizer: Any, texts: Texts, counts_VN: np.ndarray, count: int
) -> list[dict[str, Any]]:
    """The beginning of ``count`` test texts of different categories, as the report colours them.

    Each has ``category``, ``layer``, ``tokens`` (their text), ``experts`` and ``frequent``: the
    expert of the token's largest count, -1 where the training texts have none.
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
            ids_1T = torch.from_numpy(ids_T.astype(np.int64))[None].to(model.device)
            model(input_ids=ids_1T, use_cache=False)
            counts_TN = counts_VN[ids_T]
            frequent_T = np.where(counts_TN.any(1), counts_TN.argmax(1), -1)
            found.append(
                {
                    "category": texts.categories[category],
                    "layer": layers[middle],
                    "tokens": [tokenizer.decode([int(i)]) for i in ids_T],
                    "experts": top_choice(
                        records[middle].index_TK.cpu().numpy(),
                        records[middle].scores_TK.cpu().numpy(),
                    ).tolist(),
                    "frequent": frequent_T.tolist(),
                }
            )
    return found
