"""The memory plans in the heads of ``recipes/models``, from the published configs.

``PYTHONPATH=. python docs/site/plans.py`` (``make plans``) writes them, in a minute;
with ``NAME...`` those of some. A test makes some of them anew.
"""

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_finetune.models.config_and_tokenizer import load_config
from moe_finetune.recipe.schema import Recipe, load_recipe
from moe_finetune.training.memory.plan import GIB, plan_recipe
from tests.published import fixture

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "recipes" / "models"
FILES = {path.stem: path for path in sorted(MODELS.glob("*.yaml"))}
FIXTURES = {"qwen3_next_80b_a3b": "qwen3_next"}
"""Fixtures whose name is not the recipe's."""
LAYERS = ("methods/orthogonal_variance.yaml", "training/lora.yaml")
GPUS = ((1, 24), (1, 80), (8, 80))
START, END = "# Memory, ", "model:"
_HEAD = re.compile(rf"{START}.*?^(?={END})", re.M | re.S)


def recipe_of(name: str) -> Recipe:
    """The recipe that is planned: the model's file under a method and LoRA."""
    files = [FILES[name], *(ROOT / "recipes" / layer for layer in LAYERS)]
    return load_recipe(files, ["data.train=my.jsonl"])


def config_of(name: str) -> Any:
    """The published config, loaded as from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        published = fixture.read(FIXTURES.get(name, name))
        (Path(folder) / "config.json").write_text(json.dumps(published.config))
        return load_config(folder)


def head(name: str, gpus: Sequence[tuple[int, int]] = GPUS) -> str:
    """The lines on memory in the head of a recipe, for each number and GiB of GPUs."""
    recipe, config = recipe_of(name), config_of(name)
    rows = recipe.data.max_length
    assert recipe.lora is not None
    lines = [
        f"{START}predicted, with {' and '.join(LAYERS)} (one row of {rows:,} tokens a GPU, rank "
        f"{recipe.lora.rank}):"
    ]
    plans = {count: plan_recipe(config, recipe, gpus=count) for count in {c for c, _ in gpus}}
    for count, gib in gpus:
        need = f"{plans[count].total / GIB:.1f} GiB" + (" each, FSDP2" if count > 1 else "")
        answer = "fits" if plans[count].fits(gib) else "does not fit"
        lines.append(f"#   {count} x {gib} GB: {answer} ({need})")
    if any(plan.scans for plan in plans.values()):
        lines.append("#   Mamba and linear attention as torch runs them; their kernels take less.")
    return "\n".join(lines) + "\n"


def written(name: str) -> str:
    """A recipe's text with its plan made anew."""
    text = _HEAD.sub("", FILES[name].read_text(encoding="utf-8"))
    return text.replace(END, head(name) + END, 1)


def main(names: list[str]) -> None:
    """Write the plans."""
    for name in names or FILES:
        FILES[name].write_text(written(name), encoding="utf-8")
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
