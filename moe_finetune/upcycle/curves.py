"""The loss of every training of an upcycle, as its logs in ``curves/`` hold it (P3 Fig. 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_finetune.io.rows import read_log
from moe_finetune.upcycle.files import CURVES
from moe_finetune.upcycle.recipe import UpcycleRecipe

Curve = list[tuple[float, float]]
"""Steps and the mean training loss since the step before, nats a token."""


def read_curves(output: Path) -> dict[str, Curve]:
    """Every curve by its training's name: ``dense``, ``seed-S.expert-N``, ``seed-S.ARM``."""
    return {
        file.stem: [
            (float(row["step"]), float(row["loss"]))
            for row in read_log(file)
            if row.get("kind") == "train"
        ]
        for file in sorted((output / CURVES).glob("*.jsonl"))
    }


@dataclass(frozen=True)
class Chart:
    """Curves that share a picture; those of arms are named as in the tables."""

    title: str
    y_label: str
    curves: dict[str, Curve]
    of_arms: bool = False


def shown_curves(recipe: UpcycleRecipe, curves: Mapping[str, Curve]) -> list[Chart]:
    """The first seed's curves as pictures: arms, experts, routers, and the dense model's."""
    at = f"seed-{recipe.seeds[0]}"

    def present(names: Mapping[str, str]) -> dict[str, Curve]:
        return {label: curves[name] for label, name in names.items() if curves.get(name)}

    arms = {arm.label or name: f"{at}.{name}" for name, arm in recipe.arms.items()}
    experts = {f"expert {n}": f"{at}.expert-{n}" for n in range(recipe.clusters.count)}
    language = "language model's loss, nats a token"
    charts = [
        Chart("Fine-tuning of the arms", language, present(arms), of_arms=True),
        Chart("Training of the experts", language, present(experts)),
        Chart(
            "Training of the routers",
            "supervised routing's loss, nats, summed over layers",
            present({"routers": f"{at}.router"}),
        ),
        Chart("Pretraining of the dense model", language, present({"dense": "dense"})),
    ]
    return [chart for chart in charts if chart.curves]
