"""What plugins register goes again, so that other tests meet the families and losses shipped."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from moe_finetune import plugins
from moe_finetune.losses.base import TERMS
from moe_finetune.losses.presets import PRESETS
from moe_finetune.models import FAMILIES
from moe_finetune.training.stages.rewards import REWARDS


@contextmanager
def as_before() -> Iterator[None]:
    """Restore registered families and losses, and the files handed on to children."""
    before = [
        (registry, dict(registry._values)) for registry in (FAMILIES, TERMS, PRESETS, REWARDS)
    ]
    files = dict(plugins._files)
    yield
    plugins._files.clear()
    plugins._files.update(files)
    os.environ.pop(plugins.VARIABLE, None)
    for registry, values in before:
        registry._values.clear()
        registry._values.update(values)
