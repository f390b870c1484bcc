"""Plain configs: those of the core families with nothing out of the ordinary in ``config.json``.

transformers takes seconds to import and to build a model, also without memory. What its classes
make of a plain config is written down in :mod:`moe_finetune.models.plain_tensors` and tested
against them. For any other, with a key or a value that is not listed here, the class itself is
asked (:mod:`moe_finetune.models.structure`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.io.config_file import QUANTIZATION
from moe_finetune.models import table_core
from moe_finetune.models.base import Family


class PlainConfig(SimpleNamespace):
    """The keys of a plain ``config.json`` as attributes, as transformers' config has them."""

    def get_text_config(self) -> PlainConfig:
        """The config itself: no core family is a composite."""
        return self


def plain_config(raw: Mapping[str, Any], family: Family) -> PlainConfig | None:
    """The config of a plain checkpoint of a core family; None where the class has to be asked.

    Args:
        raw: the content of ``config.json``, which ``check_config`` has passed.
        family: of its ``model_type``.
    """
    if family not in table_core.FAMILIES or not _NEEDED[family.name] <= raw.keys():
        return None
    if not all(key in _VALUES and _VALUES[key](value) for key, value in raw.items()):
        return None
    if not (_tokens(raw) and _sizes(raw) and _rotation(raw)):
        return None
    experts = [raw[name] for name in _EXPERTS if name in raw]
    if len(experts) != (0 if "n_routed_experts" in _NEEDED[family.name] else 1):
        return None
    config = PlainConfig(
        **(_DEFAULTS | dict(raw) | dict(zip(_EXPERTS, experts * 2, strict=False))),
    )
    config.head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    try:
        family.check(config)
    except UnsupportedModelError:
        return None
    fits = 1 <= family.top_k(config) <= family.num_experts(config)
    return config if fits and family.moe_layers(config) else None


_EXPERTS = ("num_experts", "num_local_experts")
"""Two names of one number."""
_ANY_FAMILY = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "num_experts_per_tok", "max_position_embeddings", "bos_token_id",
    "eos_token_id",
}  # fmt: skip
_DEEPSEEK = _ANY_FAMILY | {
    "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "first_k_dense_replace",
    "norm_topk_prob",
}  # fmt: skip
_MLA = _DEEPSEEK | {
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "routed_scaling_factor",
}  # fmt: skip
_NEEDED: dict[str, set[str]] = {
    "deepseek_moe": _DEEPSEEK,
    "deepseek_v2": _MLA,
    "moonlight": _MLA,
    "qwen3_moe": _ANY_FAMILY | {"moe_intermediate_size", "norm_topk_prob"},
    "olmoe": _ANY_FAMILY | {"norm_topk_prob"},
    "mixtral": _ANY_FAMILY,
}
"""What a plain config says itself: defaults differ by class."""
_DEFAULTS: dict[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1, "moe_layer_freq": 1}
"""The same in every class that has them."""


def _size(value: Any) -> bool:
    return type(value) is int and value > 0


def _width(value: Any) -> bool:
    """Not one, which transformers' conversion of stacks squeezes away."""
    return _size(value) and value > 1


def _size_or_none(value: Any) -> bool:
    return value is None or _size(value)


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _amount(value: Any) -> bool:
    return type(value) is float and value >= 0


def _spread(value: Any) -> bool:
    return type(value) is float and 0 <= value <= 1


def _flag(value: Any) -> bool:
    return type(value) is bool


def _no(value: Any) -> bool:
    return value is False


def _none(value: Any) -> bool:
    return value is None


def _word(value: Any) -> bool:
    return type(value) is str


def _token(value: Any) -> bool:
    return value is None or _count(value)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _layers(value: Any) -> bool:
    return type(value) is list and all(map(_count, value))


def _mapping(value: Any) -> bool:
    return value is None or type(value) is dict


def _classes(value: Any) -> bool:
    """Names of a repository's own classes, which are not used for a family known here."""
    return type(value) is dict and all(map(_word, value.values()))


_VALUES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_MLA - {"first_k_dense_replace"}, _size),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "decoder_sparse_step", "moe_layer_freq", "n_group",
         "topk_group", "pretraining_tp", "max_window_layers", "qk_head_dim", "head_dim"),
        _size,
    ),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), _count),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), _width),
    **dict.fromkeys(("q_lora_rank", "sliding_window"), _size_or_none),
    **dict.fromkeys(
        ("rms_norm_eps", "attention_dropout", "router_aux_loss_coef", "routed_scaling_factor",
         "aux_loss_alpha", "router_jitter_noise"),
        _amount,
    ),
    **dict.fromkeys(
        ("use_cache", "norm_topk_prob", "output_router_logits", "use_sliding_window", "seq_aux",
         "rope_interleave"),
        _flag,
    ),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), _no),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _token),
    **dict.fromkeys(
        ("model_type", "dtype", "torch_dtype", "transformers_version", "scoring_func",
         "topk_method"),
        _word,
    ),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _mapping),
    "auto_map": _classes,
    "architectures": lambda value: type(value) is list and all(map(_word, value)),
    "mlp_only_layers": _layers,
    "hidden_act": lambda value: value == "silu",
    "rope_theta": _number,
    "initializer_range": _spread,
    "clip_qkv": _none,
    QUANTIZATION: _none,
}  # fmt: skip
"""The keys of published configs, and which of their values are ordinary."""


def _tokens(raw: Mapping[str, Any]) -> bool:
    """Whether the special tokens lie in the vocabulary."""
    ids = (raw.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id"))
    return all(number is None or number < raw["vocab_size"] for number in ids)


def _sizes(raw: Mapping[str, Any]) -> bool:
    """Whether hidden states divide into heads, and heads into pairs to rotate."""
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    head = raw.get("qk_rope_head_dim") or raw.get("head_dim") or hidden // heads
    queries = raw.get("qk_nope_head_dim", 0) + raw.get("qk_rope_head_dim", 0)
    return (
        hidden % heads == head % 2 == heads % raw["num_key_value_heads"] == 0
        and raw.get("head_dim") in (None, head)
        and raw.get("qk_head_dim") in (None, queries)
    )


def _rotation(raw: Mapping[str, Any]) -> bool:
    """Whether positions are rotated as published: by one base, or stretched by YaRN as it says."""
    if "rope_parameters" in raw:
        if "rope_theta" in raw or "rope_scaling" in raw or raw["rope_parameters"] is None:
            return False
        facts = dict(raw["rope_parameters"])
    else:
        facts = {"rope_theta": raw.get("rope_theta")} | (raw.get("rope_scaling") or {})
    names = [facts.pop(key) for key in ("rope_type", "type") if key in facts] or ["default"]
    if names not in (["default"], ["yarn"]) or not all(map(_number, facts.values())):
        return False
    if names == ["default"]:
        return facts.keys() == {"rope_theta"}
    return (
        facts.keys() == _YARN
        and facts["factor"] >= 1
        and facts["beta_fast"] > facts["beta_slow"]
        and facts["factor"] * facts["original_max_position_embeddings"]
        == raw["max_position_embeddings"]
    )


_YARN = {
    "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim",
}  # fmt: skip
