"""Model types without a class in transformers, whose classes are in this package."""

from moe_finetune.models import deepseek_moe

MODEL_TYPES = (deepseek_moe.FAMILY.model_type,)


def register() -> None:
    """Register them with transformers' Auto classes; safe to call again."""
    deepseek_moe.register()
