"""All families that follow transformers' common experts interface."""

from moe_finetune.models import (
    table_composite,
    table_core,
    table_other,
    table_sigmoid,
    table_softmax,
)

CORE = table_core.FAMILIES
FAMILIES = tuple(
    sorted(
        (*table_softmax.FAMILIES, *table_sigmoid.FAMILIES, *table_other.FAMILIES),
        key=lambda family: family.name,
    )
)
COMPOSITES = tuple(sorted(table_composite.FAMILIES, key=lambda family: family.name))
PARTS = table_composite.PARTS
REFUSED = table_composite.REFUSED
