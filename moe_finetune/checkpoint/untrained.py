"""Tensors in published files that are not the model's own: MTP heads, and what classes ignore.

transformers declares what its class ignores (``_keys_to_ignore_on_load_unexpected``). Where it
names a layer by its number, that is the published model's first layer after the decoder's, and a
smaller one of the family has its head after its own last layer. A config that counts predicting
layers declares them too (MiniMax-M2, whose class declares nothing). Such tensors are
neither loaded nor trained, and every export carries their bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from moe_finetune.checkpoint.contents import Checkpoint, layer_number
from moe_finetune.models import Family
from moe_finetune.models.structure import ignored_names, renamed_as_loaded

MTP = "the MTP head"
COMPUTED = "buffers that loaders compute"
TIED = "a tied language-model head"
OTHER = "parts that transformers ignores"

_HEAD = "lm_head.weight"
# A buffer that old exports stored and every loader computes anew.
_INVERSE_FREQUENCIES = ".rotary_emb.inv_freq"
# Joins the embedding and the hidden state: no decoder layer has it, every MTP layer has.
_JOINT = ".eh_proj.weight"
# What configs call the number of layers that predict further tokens.
_COUNTS = (
    "num_nextn_predict_layers",
    "num_mtp_modules",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
)
_NUMBERED = re.compile(r"layers\\\.(\d+)")


def untrained(names: Iterable[str], config: Any, family: Family | None) -> dict[str, str]:
    """Those of the files' ``names`` that loaders ignore, each with the part it belongs to.

    Args:
        names: tensors of a checkpoint's files, those that the model needs among them.
        config: transformers' config.
        family: whose names the files have; None for a dense model.
    """
    file_names = list(names)
    patterns = list(_patterns(config))
    predicting = _predicting_layers(file_names, config, family)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    parts = {}
    for name in file_names:
        if name.endswith(_INVERSE_FREQUENCIES):
            parts[name] = COMPUTED
        elif tied and name.endswith(_HEAD):
            parts[name] = TIED
        elif layer_number(name, family) in predicting:
            parts[name] = MTP
        elif any(p.search(name) or p.search(renamed_as_loaded(config, name)) for p in patterns):
            in_layer = layer_number(name, family) is not None
            parts[name] = MTP if in_layer or "mtp" in name else OTHER
    return parts


def stale_head(checkpoint: Checkpoint, carried: bool = True) -> list[str]:
    """A note that an MTP head does not follow the layers that it reads; none without a head.

    Args:
        carried: whether what is written has the head; a model that trains in full is saved without.
    """
    count, _ = checkpoint.parts_left_out().get(MTP, (0, 0))
    if not count:
        return []
    if not carried:
        return [
            f"{MTP} ({count} tensors) is not in merged/: a model that trains without an adapter "
            "is saved without it, so speculative decoding with it is not possible"
        ]
    return [
        f"{MTP} ({count} tensors) is copied unchanged: it does not train with the layers that it "
        "reads, so speculative decoding may accept fewer tokens; the output stays the same"
    ]


def _patterns(config: Any) -> Iterator[re.Pattern[str]]:
    """What transformers and the config declare, without layers of larger models."""
    text = config.get_text_config()
    layers = text.num_hidden_layers
    declared = list(ignored_names(config))
    if any(_counts(text)):
        declared.append(r"(^|\.)mtp(_\w+)?\.")
    for pattern in declared:
        layer = _NUMBERED.search(pattern)
        if layer is None or int(layer[1]) >= layers:
            yield re.compile(pattern)


def _predicting_layers(names: list[str], config: Any, family: Family | None) -> set[int]:
    """Layers after the decoder's last that predict further tokens, as DeepSeek-V3 has them."""
    text = config.get_text_config()
    first = text.num_hidden_layers
    in_class = any(_NUMBERED.search(pattern) for pattern in ignored_names(config))
    allowed = range(first, first + max(*_counts(text), in_class))
    joined = {layer_number(name, family) or 0 for name in names if name.endswith(_JOINT)}
    return {layer for layer in joined if layer in allowed}


def _counts(text: Any) -> list[int]:
    counts = (getattr(text, key, None) for key in _COUNTS)
    return [count for count in counts if isinstance(count, int)] or [0]
