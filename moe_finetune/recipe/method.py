"""The ``method:`` section: from a preset and its changes to validated losses and perturbations."""

from collections.abc import Mapping
from math import inf
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    field_serializer,
)

from moe_finetune.errors import RecipeError, did_you_mean
from moe_finetune.recipe.section import Section
from moe_finetune.recipe.tree import dotted, merge_mappings
from moe_finetune.recipe.validation import describe


class Perturbations(Section):
    """Noise that some methods add to routing during training."""

    jitter: float | None = Field(
        default=None, gt=0, lt=1, description="random factor of the router's input, within 1 ± this"
    )
    expert_dropout: float | None = Field(
        default=None, gt=0, lt=1, description="share of expert outputs that are set to 0"
    )
    random_second_choice: bool = Field(
        default=False, description="the second expert is drawn by its score (GShard)"
    )


class StrengthSection(Section):
    """Whether the losses' gradients are measured against that of the trainer's loss."""

    first: bool = Field(default=True, description="measure in the first optimizer step")


class Method(Section):
    """The losses of a method and its other changes to routing.

    ``terms`` maps a loss's name to its validated options; a term of weight 0 is not in it. Build
    one with :func:`resolve_method`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)

    preset: str | None = Field(default=None, description="a file of `recipes/methods`")
    share: float | Literal["recommended"] | None = Field(
        default=None,
        exclude=True,  # becomes the share of each term
        description="share of each of the preset's terms except z-loss and, among others, "
        "balance, instead of the paper's weight, such as 0.1; `recommended`: the measured "
        "shares of [methods](../methods.md#recommended-shares), balance included",
    )
    terms: dict[str, SerializeAsAny[BaseModel]] = Field(
        default={}, description="loss -> its options, see [losses](losses.md)"
    )
    token_mask: Literal["attention", "labels"] = Field(
        default="attention", description="tokens that count: all that attend, or those with a label"
    )
    perturbations: Perturbations = Perturbations()
    strength: StrengthSection = StrengthSection()
    bias_update: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="how far the selection bias moves after each step (loss-free balancing)",
    )
    export_bias: Literal["write", "drop"] = Field(
        default="write", description="whether a learned bias goes into the merged checkpoint"
    )

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """The options of each loss by its name."""
        return {name: options.model_dump() for name, options in self.terms.items()}

    @property
    def trains_routers(self) -> bool:
        """Whether the gradient of any loss reaches the routers of its layers."""
        from moe_finetune.losses import TERMS

        return any("router" in TERMS[name].parts(options) for name, options in self.terms.items())

    @field_serializer("terms")
    def _with_removed(self, terms: dict[str, BaseModel]) -> dict[str, Any]:
        """Mark the preset's removed terms, so that the dump resolves to the same method."""
        removed = set(_preset(self.preset).get("terms", {})) - set(terms) if self.preset else ()
        dumped = {name: options.model_dump(mode="json") for name, options in terms.items()}
        return dumped | {name: {"weight": 0.0} for name in sorted(removed)}


def resolve_method(method: str | dict[str, Any] | Method | None, **overrides: Any) -> Method:
    """Resolve a preset's name or a ``method:`` mapping to a validated :class:`Method`.

    ``overrides`` are keys of ``method:`` that win over the mapping. Terms of weight 0 are removed.

    Raises:
        RecipeError: an unknown preset, term or option (with the nearest known one), or a value
            outside its range.
    """
    if isinstance(method, Method):
        options = method.model_dump(mode="json")
    elif method is not None and not isinstance(method, str | dict):
        raise RecipeError(
            f"method: must be a preset's name or a mapping such as {{preset: erc}}, not {method!r}"
        )
    else:
        options = {"preset": method} if isinstance(method, str) else dict(method or {})
    options = merge_mappings(options, overrides)
    preset = options.get("preset")
    if preset is not None and not isinstance(preset, str):
        raise RecipeError(f"method.preset: {preset!r} must be the name of a preset")
    if preset:
        options = merge_mappings(_preset(preset), _with_share(preset, options))
    elif options.get("share") is not None:
        raise RecipeError(
            "method.share: needs method.preset; without one, give each term its own share"
        )
    options["terms"] = _terms(options.get("terms") or {})
    try:
        return Method.model_validate(options).model_copy(update={"share": None})
    except ValidationError as error:
        raise RecipeError("\n".join(describe(Method, error, ("method",)))) from None


def _preset(name: str) -> dict[str, Any]:
    from moe_finetune.losses.presets import PRESETS

    if name not in PRESETS:
        raise RecipeError(f"method.preset: unknown preset '{name}'{did_you_mean(name, PRESETS)}")
    return PRESETS[name].method()


WEIGHTED = ("load_balance", "z_loss")
"""Constraints: they keep their weight if ``method.share`` is set and there are other terms."""


def _with_share(preset: str, method: dict[str, Any]) -> dict[str, Any]:
    """Apply ``method.share`` to each of the preset's terms without a strength in ``terms``."""
    share, changes = method.get("share"), method.get("terms") or {}
    if share is None or not isinstance(changes, dict):
        return method
    shares = {
        name: dict(options)
        for name, options in _shares(preset, share).items()
        if not isinstance(changes.get(name), dict)
        or not {"weight", "share", "target"} & changes[name].keys()
    }
    return {**method, "terms": merge_mappings(shares, changes)}


def _shares(preset: str, share: Any) -> Mapping[str, Any]:
    """Options of the preset's terms for a value of ``method.share``."""
    from moe_finetune.losses.presets import PRESETS

    if share == "recommended":
        if recommended := PRESETS[preset].recommended:
            return recommended
        raise RecipeError(
            f"method.share: no shares are recommended for preset '{preset}', only for "
            f"{', '.join(name for name in PRESETS if PRESETS[name].recommended)}; set "
            "method.share=null for the weights of the paper, or give a number such as 0.1"
        )
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < inf:
        raise RecipeError(
            "method.share: must be a number more than 0, such as 0.1, or 'recommended', "
            f"not {share!r}"
        )
    terms = PRESETS[preset].terms
    # Constraints keep their weight, unless balance is all that the preset is for.
    aims = [name for name in terms if name not in WEIGHTED] or [
        name for name in terms if name == "load_balance"
    ]
    if not aims:
        raise RecipeError(
            f"method.share: preset '{preset}' has no loss that a share could set; leave share "
            "out, or set method.share=null where another file has one"
        )
    return {name: {"share": share} for name in aims}


def _terms(terms: Any) -> dict[str, BaseModel]:
    from moe_finetune.losses import TERMS

    if not isinstance(terms, dict):
        raise RecipeError(f"method.terms: {terms!r} must be a mapping of losses to their options")
    resolved: dict[str, BaseModel] = {}
    for name, options in terms.items():
        key = ("method", "terms", name)
        if name not in TERMS:
            raise RecipeError(f"{dotted(key)}: unknown loss{did_you_mean(str(name), TERMS)}")
        if not isinstance(options, dict):
            raise RecipeError(f"{dotted(key)}: must be a mapping such as {{weight: 1.0e-3}}")
        model = TERMS[name].Options
        try:
            validated = model.model_validate(options)
        except ValidationError as error:
            raise RecipeError("\n".join(describe(model, error, key))) from None
        if not validated.removed:
            resolved[name] = validated
    return resolved
