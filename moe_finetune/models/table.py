"""Families that follow transformers' common experts interface, all of them, by name."""

from moe_finetune.models import table_other, table_sigmoid, table_softmax

FAMILIES = tuple(
    sorted(
        (*table_softmax.FAMILIES, *table_sigmoid.FAMILIES, *table_other.FAMILIES),
        key=lambda family: family.name,
    )
)
