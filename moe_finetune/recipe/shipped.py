"""The location of the recipes that come with the package."""

import sysconfig
from pathlib import Path

from moe_finetune.errors import RecipeError


def recipes_folder() -> Path:
    """``recipes/`` of a checkout, or the copy that was installed with the package."""
    candidates = [
        Path(__file__).resolve().parents[2] / "recipes",
        Path(sysconfig.get_path("data")) / "share" / "moe-finetune" / "recipes",
    ]
    for folder in candidates:
        if (folder / "demo").is_dir():
            return folder
    raise RecipeError(
        f"the package's recipes were not found in {', '.join(map(str, candidates))}; reinstall "
        "the package"
    )


def find_recipe(path: Path) -> Path:
    """``path`` if it exists; otherwise ``recipes/...`` means the package's file."""
    if path.parts[:1] != ("recipes",) or path.exists():
        return path
    shipped = recipes_folder().joinpath(*path.parts[1:])
    return shipped if shipped.is_file() else path
