"""Model types whose classes are in this package; transformers has none of their own."""

from moe_finetune.models import deepseek_moe

MODEL_TYPES = (deepseek_moe.FAMILY.model_type,)


def register(model_type: object) -> None:
    """Register the class of ``model_type`` with transformers, if it is one of these; repeatable."""
    if model_type in MODEL_TYPES:
        deepseek_moe.register()
