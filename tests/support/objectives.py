"""Losses as a recipe names them, on a model."""

from collections.abc import Mapping
from typing import Any

from moe_finetune.losses.base import ModelFacts
from moe_finetune.losses.objective import Objective
from moe_finetune.recipe.method import resolve_method


def objective_of(terms: Mapping[str, Any], facts: ModelFacts) -> Objective:
    return Objective(resolve_method({"terms": dict(terms)}).terms, facts)
