"""Keys that recipes and studies of earlier versions have, and what replaces each.

A run folder's ``recipe.yaml`` has every key of the version that wrote it. So a dropped key at its
old default, or null, is read and ignored; any other value is refused with its replacement.
"""

from pathlib import Path
from typing import Any

from moe_finetune.errors import RecipeError
from moe_finetune.recipe.tree import Key, Tree, dotted
from moe_finetune.recipe.validation import placed

OTHER_TRAINERS = "SpecializationCallback adds the method to TRL's own trainer, see docs/stages.md"
SLURM = "`sbatch --array` runs a study's shards, see recipes/launch/README.md"
OWN_MODEL = (
    "give your PEFT model and SpecializationCallback to TRL's trainer, see "
    "docs/other-trainers.md; merge takes its adapter"
)
ON_THE_MEAN = (
    "was dropped; a weight multiplies the mean over tokens: give the weight times the tokens of "
    "the sum"
)
DATE = "chat templates write the date of the day on which the data are prepared"
KEYS: dict[str, tuple[Any, str]] = {
    "data.date": (None, DATE),
    "data.ignore": ([], "remove the columns or fields from the rows"),
    "plan": (None, "`train --dry-run` of an arm plans its memory; `study --plan` lists the runs"),
    "launch.options": ({}, SLURM),
    "launch.hours": (24.0, SLURM),
    "launch.jobs": (None, SLURM),
    "lora.use_dora": (False, f"was dropped; {OWN_MODEL}"),
    "lora.loraplus_lr_ratio": (None, f"LoRA+ was dropped; {OWN_MODEL}"),
    "method.terms.*.one_sided": (False, "was dropped; both vectors of a pair are differentiated"),
    "method.strength.every": (
        None,
        "give a term its own every, or call moe_finetune.measure_strength in Python",
    ),
    "model.family": (
        None,
        "a plugin registers the family: --plugin my_family.py, see docs/extending.md",
    ),
    "numerics": (None, "was dropped; a loss that is not finite stops the run, a collapse warns"),
    "numerics.on_nan": ("stop", "steps are no longer skipped; lower trainer.learning_rate"),
    "numerics.max_violation": (None, "the limit is 0.75 x (experts / selected - 1)"),
    "numerics.dead_experts": (0.5, "the limit is 0.5"),
    "numerics.patience": (5, "a collapse is reported after 5 logs"),
    "numerics.deterministic": (False, "set trainer.full_determinism: true"),
    "stages": (None, "give each stage its own run: train next.yaml model.path=runs/first/merged"),
    "teacher": (None, f"stage distill was dropped; {OTHER_TRAINERS}"),
}
"""Dotted key, ``*`` for any loss -> its old default, and what to do instead."""
VALUES: dict[str, dict[str, str]] = {
    "launch.kind": {"slurm": f"was dropped; {SLURM}"},
    "lora.init": dict.fromkeys(
        ("orthogonal", "olora", "pissa", *(f"pissa_niter_{n}" for n in range(1, 100))),
        f"was dropped (kept: kaiming, gaussian); {OWN_MODEL}",
    ),
    "model.quantization": {"int8": "was dropped; set nf4"},
    "stage": dict.fromkeys(
        ("kto", "orpo", "distill"),
        f"was dropped (kept: sft, pretrain, dpo, grpo); {OTHER_TRAINERS}",
    ),
}
"""Dotted key -> values that were dropped, and what to do instead."""
TERMS = {"teacher_routing": "was dropped with stage distill; remove it (weight: 0)"}
"""Dropped losses, and what to do instead."""


def without_dropped(tree: Tree) -> Tree:
    """``tree`` without dropped keys at their old default.

    Raises:
        RecipeError: a dropped key has another value; a line for each.
    """
    problems: list[str] = []
    values = _kept(tree.values, (), problems)
    if Path(tree.origin(("data", "date")).partition(":")[0]).name == "recipe.yaml":
        # Runs of earlier versions wrote the date there themselves.
        problems = [line for line in problems if not line.startswith("data.date:")]
    if problems:
        raise RecipeError("\n".join(placed(tree, line) for line in problems))
    return Tree(values, tree.origins)


def _kept(values: dict[str, Any], above: Key, problems: list[str]) -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        key = (*above, name)
        problem = _problem(key, value)
        if problem is None:
            if key[:2] == ("method", "terms") and len(key) == 3 and isinstance(value, dict):
                value = _with_number(key, value, problems)
            inner = _kept(value, key, problems) if isinstance(value, dict) else value
            if inner != {} or value == {}:  # a section of dropped keys alone is as if not given
                kept[name] = inner
        elif problem:
            problems.append(f"{dotted(key)}: {problem}")
    return kept


def _with_number(key: Key, options: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """A loss's options, with its weight on a sum over ``tokens`` as a weight on the mean."""
    options = dict(options)
    reduction, tokens = options.pop("reduction", None), options.pop("tokens", None)
    if tokens is None and reduction in (None, "mean"):
        if reduction and options.get("weight") is None and not _found(options):
            problems.append(f"{dotted(key)}.reduction: {ON_THE_MEAN}")
        return options
    weight = options.get("weight")
    if _is_number(weight) and _is_number(tokens) and reduction == "sum":
        options["weight"] = weight * tokens
    elif weight != 0 and not (weight is None and _found(options)):
        problems.append(f"{dotted(key)}.{'reduction' if reduction else 'tokens'}: {ON_THE_MEAN}")
    return options


def _found(options: dict[str, Any]) -> bool:
    """Return whether the first step finds the loss's weight."""
    return bool(options.get("share") or options.get("target"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _problem(key: Key, value: Any) -> str | None:
    """Why a dropped key is refused; "" if it is ignored, None if it is not dropped."""
    for section in ("lora", "method"):  # also below a stage or an arm of an upcycle
        if section in key:
            key = key[key.index(section) :]
    of_term = key[:2] == ("method", "terms") and len(key) > 2
    if of_term and len(key) == 3 and key[2] in TERMS:
        removed = value is None or (isinstance(value, dict) and value.get("weight") == 0)
        return "" if removed else TERMS[str(key[2])]
    name = dotted(("method", "terms", "*", *key[3:]) if of_term else key)
    if isinstance(value, str) and value in VALUES.get(name, {}):
        return f"{value!r} {VALUES[name][value]}"
    if name not in KEYS or (isinstance(value, dict) and f"{name}." in " ".join(KEYS)):
        return None  # a section's keys are looked at one by one
    default, instead = KEYS[name]
    return "" if value is None or value == default else instead
