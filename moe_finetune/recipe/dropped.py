"""Keys and values that recipes and studies of earlier versions have, and what replaces each.

A run's ``recipe.yaml`` has every key of the version that wrote it. So a dropped key at its old
default, or null, is ignored; any other value is refused.
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from moe_finetune.errors import RecipeError
from moe_finetune.recipe.tree import Tree
from moe_finetune.recipe.validation import placed

SLURM = "`sbatch --array` runs a study's shards, see recipes/launch/README.md"
OTHERS = "SpecializationCallback adds the method to TRL's own trainer, see docs/stages.md"
STAGES = f"kto, orpo and distill were dropped (kept: sft, pretrain, dpo, grpo); {OTHERS}"
OWN_MODEL = (
    "give your PEFT model and SpecializationCallback to TRL's trainer, see "
    "docs/other-trainers.md; merge takes its adapter"
)
STARTS = f"orthogonal, olora and pissa were dropped (kept: kaiming, gaussian); {OWN_MODEL}"
EVERY = "give a term its own every, or call moe_finetune.measure_strength in Python"
MEAN = "was dropped; a weight multiplies the mean over tokens: give weight x tokens of the sum"
REWARD = "a recipe runs no file; register the reward in a --plugin FILE, see docs/extending.md"
DROPPED: dict[str, tuple[Any, str]] = {
    "data.date": (None, "chat templates write the date of the day when the data are prepared"),
    "data.ignore": ([], "remove the columns or fields from the rows"),
    "plan": (None, "`train --dry-run` of an arm plans its memory; `study --plan` lists the runs"),
    "launch.options": ({}, SLURM),
    "launch.hours": (24.0, SLURM),
    "launch.jobs": (None, SLURM),
    "launch.kind=slurm": (None, f"slurm was dropped; {SLURM}"),
    "*lora.use_dora": (False, f"was dropped; {OWN_MODEL}"),
    "*lora.loraplus_lr_ratio": (None, f"LoRA+ was dropped; {OWN_MODEL}"),
    "*lora.init=orthogonal": (None, STARTS),
    "*lora.init=olora": (None, STARTS),
    "*lora.init=pissa*": (None, STARTS),
    "*method.terms.*.one_sided": (False, "was dropped; both vectors of a pair are differentiated"),
    "*method.terms.*.reduction": (None, MEAN),
    "*method.terms.*.tokens": (None, MEAN),
    "*method.terms.teacher_routing": ({"weight": 0}, "was dropped with stage distill; remove it"),
    "*method.strength.every": (None, EVERY),
    "model.family": (None, "--plugin my_family.py registers a family, see docs/extending.md"),
    "model.quantization=int8": (None, "int8 was dropped; set nf4"),
    "numerics=[!{]*": (None, "was dropped; a loss that is not finite stops, a collapse warns"),
    "numerics.on_nan": ("stop", "steps are no longer skipped; lower trainer.learning_rate"),
    "numerics.max_violation": (None, "the limit is 0.75 x (experts / selected - 1)"),
    "numerics.dead_experts": (0.5, "the limit is 0.5"),
    "numerics.patience": (5, "a collapse is reported after 5 logs"),
    "numerics.deterministic": (False, "set trainer.full_determinism: true"),
    "rewards.*.file": (None, REWARD),
    "rewards.*.function": ("reward", REWARD),
    "stage=kto": (None, STAGES),
    "stage=orpo": (None, STAGES),
    "stage=distill": (None, STAGES),
    "stages": (None, "give each stage its own run: train next.yaml model.path=runs/first/merged"),
    "teacher": (None, f"stage distill was dropped; {OTHERS}"),
}
"""Key or ``key=value`` -> the key's old default, and what to do instead.

A first ``*`` is for sections of an upcycle, the others for a loss or a value.
"""


def without_dropped(tree: Tree) -> Tree:
    """``tree`` without dropped keys at their old default.

    Raises:
        RecipeError: a dropped key has another value; a line for each.
    """
    problems: list[str] = []
    values = _without(tree.values, "", problems)
    if Path(tree.origin(("data", "date")).partition(":")[0]).name == "recipe.yaml":
        # Runs of earlier versions wrote the date there themselves.
        problems = [line for line in problems if not line.startswith("data.date:")]
    if problems:
        raise RecipeError("\n".join(placed(tree, line) for line in problems))
    return Tree(values, tree.origins)


def _without(value: Any, above: str, problems: list[str]) -> Any:
    if isinstance(value, list):
        return [_without(item, f"{above}{index}.", problems) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    remaining = {}
    is_loss = re.search(r"(^|\.)method\.terms\.[^.]+\.$", above)
    for name, inner in (_on_mean(value) if is_loss else value).items():
        key, with_value = f"{above}{name}", f"{above}{name}={inner}"
        for pattern, (default, instead) in DROPPED.items():
            if fnmatchcase(key, pattern) or fnmatchcase(with_value, pattern):
                if inner is not None and inner != default:
                    problems.append(f"{key}: {instead}")
                break
        else:
            result = _without(inner, f"{key}.", problems)
            if result != {} or inner == {}:  # a section of dropped keys alone is as if not given
                remaining[name] = result
    return remaining


def _on_mean(options: dict[str, Any]) -> dict[str, Any]:
    """A loss's options, with its weight on the sum over ``tokens`` as a weight on the mean."""
    weight, share = options.get("weight"), options.get("share") or options.get("target")
    scale = {"mean": 1, "sum": options.get("tokens")}.get(str(options.get("reduction")))
    if not isinstance(scale, int | float) or (weight is None and not share):
        return options
    changed = {"weight": weight * scale} if isinstance(weight, int | float) else {}
    return {k: v for k, v in options.items() if k not in ("reduction", "tokens")} | changed
