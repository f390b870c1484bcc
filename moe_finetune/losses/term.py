"""Formulas as losses: tensors of a layer's record go in, keyword arguments are the options."""

import inspect
import typing
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from typing import Any, Literal, TypeVar

from pydantic import create_model
from torch import Tensor

from moe_finetune.losses.base import TERMS, LayerContext, Need, Term, TermOptions
from moe_finetune.losses.record import RoutingRecord

_DERIVED = (
    name for name, value in vars(RoutingRecord).items() if isinstance(value, cached_property)
)
_NO_TENSORS = ("layer", "score", "expert_factors")
READ = sorted({field.name for field in fields(RoutingRecord)}.union(_DERIVED) - {*_NO_TENSORS})
"""Names of a record's tensors that a formula may take."""
Formula = TypeVar("Formula", bound=Callable[..., Tensor])


def term(
    name: str,
    *,
    source: str,
    reads: str,
    trains: Literal["router", "experts"],
    gram: Literal["outputs", "activations"] | None = None,
    below: bool = True,
) -> Callable[[Formula], Formula]:
    """Register the decorated formula as the loss ``name``, and return it unchanged.

    The formula's parameters that are annotated with a pydantic ``Field`` (range, description) are
    the loss's options, with their defaults. Each other one receives the attribute of its name of
    the layer's :class:`RoutingRecord`; ``gram_TKK`` the inner products of what ``gram`` names.

    Args:
        name: key below ``method.terms``.
        source: paper and equation.
        reads: what it reads, for the documentation.
        trains: the part of its own layer that the gradient reaches.
        gram: whose inner products ``gram_TKK`` are.
        below: whether the gradient also flows into the layer's input.

    Raises:
        ValueError: the name is registered already, or a parameter is no tensor of the record
            and no option.
    """

    def register(formula: Formula) -> Formula:
        hints = typing.get_type_hints(formula, include_extras=True)
        options: dict[str, Any] = {}
        tensors: dict[str, str] = {}
        for parameter in inspect.signature(formula).parameters.values():
            key, hint = parameter.name, hints.get(parameter.name)
            if typing.get_origin(hint) is typing.Annotated:
                options[key] = (hint, parameter.default)
                continue
            tensors[key] = f"{gram}_gram_TKK" if key == "gram_TKK" else key
            if hint is None or tensors[key] not in READ:
                problem = "has no annotation" if hint is None else "is not in a layer's record"
                raise ValueError(
                    f"@term '{name}': parameter '{key}' {problem}. @term reads tensors, annotated "
                    f"as Tensor, by these names: {', '.join(READ)}, and gram_TKK with gram=; an "
                    "option is annotated as Annotated[float, Field(...)], with a default"
                )

        def loss(self: Term, record: RoutingRecord, context: LayerContext) -> Tensor:
            inputs = {key: getattr(record, attribute) for key, attribute in tensors.items()}
            return formula(**inputs, **{key: getattr(self.options, key) for key in options})

        recorded = {attribute.rpartition("_")[0] for attribute in tensors.values()}
        members = {
            "name": name,
            "source": source,
            "reads": reads,
            "trains": frozenset({trains}),
            "needs": frozenset(recorded & set(typing.get_args(Need))),
            "below": below,
            "Options": create_model(f"{name}_options", __base__=TermOptions, **options),
            "loss": loss,
            "__doc__": formula.__doc__,
        }
        TERMS.register(name, type(name, (Term,), members))
        return formula

    return register
