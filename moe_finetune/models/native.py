"""Model types without a class in transformers, whose classes are in this package."""

from moe_finetune.models import autonomy, deepseek_moe

MODEL_TYPES = tuple(module.FAMILY.model_type for module in (deepseek_moe, autonomy))


def register() -> None:
    """Register them with transformers' Auto classes; safe to call again."""
    deepseek_moe.register()
    autonomy.register()
