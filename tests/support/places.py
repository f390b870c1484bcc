"""What the class of a family's tiny config shows."""

from typing import Any

from moe_finetune.models import FAMILIES
from moe_finetune.models.module_places import Places
from tests.support import tiny, tiny_families


def config(family: str) -> Any:
    """The tiny config of ``family``."""
    return (tiny if family in tiny.FAMILY_NAMES else tiny_families).config(family)


def places(family: str) -> Places:
    """The places in the tiny model of ``family``."""
    return FAMILIES[family].places(config(family))
