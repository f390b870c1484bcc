"""The cache for what can be rebuilt: the demo's checkpoint, prepared data."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$MOE_FINETUNE_CACHE``, or ``moe-finetune`` in the user's cache folder."""
    if named := os.environ.get("MOE_FINETUNE_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moe-finetune"
