"""What plugins register goes again, so that other tests meet the families and losses shipped."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from moe_finetune import plugins
from moe_finetune.losses.base import TERMS
from moe_finetune.models import FAMILIES


@contextmanager
def as_before() -> Iterator[None]:
    """Restore registered families and losses, and the files handed on to children."""
    families, terms = dict(FAMILIES._values), dict(TERMS._values)
    yield
    os.environ.pop(plugins.VARIABLE, None)
    for registry, values in ((FAMILIES, families), (TERMS, terms)):
        registry._values.clear()
        registry._values.update(values)
