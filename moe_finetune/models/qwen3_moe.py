"""Qwen3-30B-A3B and its kin: softmax router, renormalised, no shared experts."""

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models.base import QKVO, Family


def _moe_layers(config) -> list[int]:
    return [
        layer
        for layer in range(config.num_hidden_layers)
        if layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    ]


def _check(config) -> None:
    if not _moe_layers(config):
        raise UnsupportedModelError("this qwen3_moe config has no MoE layer (mlp_only_layers)")


FAMILY = Family(
    name="qwen3_moe",
    model_type="qwen3_moe",
    title="Qwen3-30B-A3B",
    score="softmax",
    attention_targets=QKVO,
    moe_layers=_moe_layers,
    check=_check,
)
