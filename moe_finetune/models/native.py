"""Model types that transformers has no class for: their classes are here."""

from __future__ import annotations

from moe_finetune.models import autonomy, deepseek_moe

MODEL_TYPES = tuple(module.FAMILY.model_type for module in (deepseek_moe, autonomy))


def register() -> None:
    """Register them with transformers' Auto classes; repeatable."""
    deepseek_moe.register()
    autonomy.register()
