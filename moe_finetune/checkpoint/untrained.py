"""Tensors in published files that are not part of the model: MTP heads and ignored tensors.

A transformers class declares what it ignores (``_keys_to_ignore_on_load_unexpected``). If it names
a layer by number, that is the layer after the published model's decoder; a smaller model of the
family has its head after its own last layer. A config that counts MTP layers declares them too
(MiniMax-M2, whose class declares nothing). Such tensors are neither loaded nor trained, and every
export copies their bytes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.models.structure import ignored_names

MTP = "the MTP head"
COMPUTED = "buffers that loaders compute"
TIED = "a tied language-model head"
OTHER = "parts that transformers ignores"

HEAD = "lm_head.weight"
# A buffer that old exports stored and every loader recomputes.
_INVERSE_FREQUENCIES = ".rotary_emb.inv_freq"
# Joins embedding and hidden state; every MTP layer has it and no decoder layer does.
_JOINT = ".eh_proj.weight"
# Config keys for the number of MTP layers.
_COUNTS = (
    "num_nextn_predict_layers",
    "num_mtp_modules",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
)
_NUMBERED = re.compile(r"layers\\\.(\d+)")


def untrained(names: Mapping[str, str], config: Any, stack: str) -> dict[str, str]:
    """The tensors that loaders ignore, each with the part it belongs to.

    Args:
        names: the tensors of a checkpoint's files that the model does not need, and the name under
            which transformers would load each.
        config: transformers' config.
        stack: how the names of the decoder's layers begin in the files.
    """
    patterns = list(_patterns(config))
    predicting = _predicting_layers(names, config, stack)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    parts = {}
    for name, loaded in names.items():
        layer = layer_of(name, stack)
        if name.endswith(_INVERSE_FREQUENCIES):
            parts[name] = COMPUTED
        elif tied and name.endswith(HEAD):
            parts[name] = TIED
        elif layer in predicting:
            parts[name] = MTP
        elif any(pattern.search(name) or pattern.search(loaded) for pattern in patterns):
            parts[name] = MTP if layer is not None or "mtp" in name else OTHER
    return parts


def layer_of(name: str, stack: str) -> int | None:
    """The decoder layer of a tensor in the files; None outside the decoder layers."""
    number = name.removeprefix(stack).partition(".")[0]
    return int(number) if name.startswith(stack) and number.isdigit() else None


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


def _predicting_layers(names: Iterable[str], config: Any, stack: str) -> set[int]:
    """MTP layers: those after the decoder's last, as in DeepSeek-V3."""
    text = config.get_text_config()
    first = text.num_hidden_layers
    in_class = any(_NUMBERED.search(pattern) for pattern in ignored_names(config))
    allowed = range(first, first + max(*_counts(text), in_class))
    joined = {layer_of(name, stack) or 0 for name in names if name.endswith(_JOINT)}
    return {layer for layer in joined if layer in allowed}


def _counts(text: Any) -> list[int]:
    counts = (getattr(text, key, None) for key in _COUNTS)
    return [count for count in counts if isinstance(count, int)] or [0]
