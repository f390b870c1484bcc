"""The ``method:`` section: from a preset and its changes to validated losses and perturbations."""

import re
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError
from pydantic.functional_serializers import field_serializer

from moe_finetune.errors import RecipeError, did_you_mean
from moe_finetune.io.terminal import terminal
from moe_finetune.recipe.explain_errors import describe, placed
from moe_finetune.recipe.section_base import Section
from moe_finetune.recipe.yaml_tree import Tree, merge_mappings, recipes_folder

if TYPE_CHECKING:
    from moe_finetune.losses.base import TermOptions
else:
    TermOptions = BaseModel  # the losses, and torch with them, are imported when one is named

Share = Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["recommended"]


class Perturbations(Section):
    """Noise that some methods add to routing during training."""

    jitter: float | None = Field(
        default=None, gt=0, lt=1, description="random factor of the router's input, within 1 ± this"
    )
    expert_dropout: float | None = Field(
        default=None, gt=0, lt=1, description="share of expert outputs that are set to 0"
    )
    random_second_choice: bool = Field(default=False, description="draw it by score (GShard)")


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
    share: Share | None = Field(
        default=None,
        exclude=True,  # becomes the share of each term
        description="share of every loss of the preset, except z-loss and, if it has other losses, "
        "balance, instead of the paper's weight, for example 0.1; `recommended`: the measured "
        "shares of [methods](../methods.md#recommended-shares), balance included",
    )
    terms: dict[str, SerializeAsAny[TermOptions]] = Field(
        default={}, description="loss -> its options, see [losses](losses.md)"
    )
    token_mask: Literal["attention", "labels"] = Field(
        default="attention", description="tokens that count: all that attend, or those with a label"
    )
    perturbations: Perturbations = Perturbations()
    strength: StrengthSection = StrengthSection()
    router_gradient: Literal["selected", "dense"] = Field(
        default="selected",
        description="experts whose routing weights learn: a token's selected ones, or all",
    )
    dense_sample: int | None = Field(
        default=None, ge=1, description="unselected experts drawn a token for `dense`; all if unset"
    )
    bias_update: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="change of the selection bias in a step",
    )
    export_bias: Literal["write", "drop"] = Field(
        default="write", description="whether a learned bias goes into the merged checkpoint"
    )

    @property
    def trains_routers(self) -> bool:
        """Whether the method has a gradient of its own for routers."""
        if self.router_gradient == "dense":
            return True
        from moe_finetune.losses import TERMS

        return any("router" in TERMS[name].parts(options) for name, options in self.terms.items())

    @field_serializer("terms")
    def _with_removed(self, terms: dict[str, TermOptions]) -> dict[str, Any]:
        """Mark the preset's removed terms, so that the dump resolves to the same method."""
        removed = set(_preset(self.preset).get("terms", {})) - set(terms) if self.preset else ()
        dumped = {name: options.model_dump(mode="json") for name, options in terms.items()}
        return dumped | {name: {"weight": 0.0} for name in sorted(removed)}


def resolve_method(method: str | dict[str, Any] | Method | None, **overrides: Any) -> Method:
    """Resolve a preset's name or a ``method:`` mapping to a validated :class:`Method`.

    ``overrides`` are keys of ``method:`` that win over the mapping. Terms of weight 0 are removed.
    """
    if isinstance(method, Method):
        options = method.model_dump(mode="json")
    elif isinstance(method, str | dict | None):
        options = method if isinstance(method, dict) else {"preset": method}
    else:
        raise RecipeError(f"method: must be a preset's name or a mapping, not {method!r}")
    options = merge_mappings(options, overrides)
    terms = options.get("terms") or {}
    checked_terms = {} if isinstance(terms, dict) else terms
    checked = _validated(Method, {**options, "terms": checked_terms}, "method")
    if checked.preset:
        preset = _preset(checked.preset)
        terms = _with_share(checked.preset, checked.share, terms)
        options = merge_mappings(preset, {**options, "terms": terms})
    elif checked.share is not None:
        raise RecipeError("method.share: needs method.preset; else give each term its own share")
    options["terms"] = _terms(options.get("terms") or {})
    resolved = _validated(Method, options, "method").model_copy(update={"share": None})
    # Only now: the preset may be what sets router_gradient.
    if resolved.dense_sample is not None and resolved.router_gradient != "dense":
        raise RecipeError(
            "method.dense_sample: needs method.router_gradient: dense; set it, or leave it out"
        )
    return resolved


def _validated(model: type[Any], options: Any, *key: str) -> Any:
    try:
        return model.model_validate(options)
    except ValidationError as error:
        raise RecipeError("\n".join(describe(model, error, key))) from None


def _preset(name: str) -> dict[str, Any]:
    from moe_finetune.losses.presets import PRESETS

    if name not in PRESETS:
        raise RecipeError(_unknown_preset(name, PRESETS))
    return PRESETS[name].method()


def _unknown_preset(name: str, presets: Iterable[str]) -> str:
    return f"method.preset: unknown preset '{name}'{_hint(name, presets)}"


def refuse_unknown_preset(tree: Tree) -> None:
    """Refuse a preset that has no file in ``recipes/methods``, before the losses are imported.

    Does nothing where they are imported already, or a plugin of the recipe, which may register
    presets, is imported later.
    """
    method = tree.values.get("method")
    name = method.get("preset") if isinstance(method, dict) else None
    if tree.values.get("plugins"):
        return
    if isinstance(name, str) and "moe_finetune.losses.presets" not in sys.modules:
        presets = [file.stem for file in (recipes_folder() / "methods").glob("*.yaml")]
        if name not in presets:
            raise RecipeError(placed(tree, _unknown_preset(name, presets)))


WEIGHTED = ("load_balance", "z_loss")
"""Constraints: they keep their weight if ``method.share`` is set and there are other terms."""


def _with_share(preset: str, share: float | str | None, terms: dict[str, Any]) -> dict[str, Any]:
    """``terms`` with ``method.share`` for each of the preset's terms without its own strength."""
    return merge_mappings(
        {
            name: dict(options)
            for name, options in _shares(preset, share).items()
            if not isinstance(terms.get(name), dict) or not {"weight", "share"} & terms[name].keys()
        },
        terms,
    )


def _shares(preset: str, share: float | str | None) -> Mapping[str, Any]:
    """Options of the preset's terms for a value of ``method.share``."""
    from moe_finetune.losses.presets import PRESETS

    if share is None:
        return {}
    if share == "recommended":
        if recommended := PRESETS[preset].recommended:
            return recommended
        raise RecipeError(
            f"method.share: no shares are recommended for preset '{preset}', only for "
            f"{', '.join(name for name in PRESETS if PRESETS[name].recommended)}; set "
            "method.share=null for the weights of the paper, or give a number such as 0.1"
        )
    terms = PRESETS[preset].terms
    # Constraints keep their weight, unless balance is all that the preset is for.
    aims = set(terms) - set(WEIGHTED) or {"load_balance"} & set(terms)
    if not aims:
        raise RecipeError(
            f"method.share: preset '{preset}' has no loss that a share could set; leave it out, or "
            "set method.share=null where another file has one"
        )
    return {name: {"share": share} for name in terms if name in aims}


def without_unusable_share(tree: Tree) -> Tree:
    """Drop ``method.share`` of an earlier file if a later one names a preset that cannot take it.

    So ``train my.yaml method=none`` runs whatever share the file has for its own preset.
    """
    from moe_finetune.losses.presets import PRESETS

    method = tree.values.get("method")
    if not tree.inherited_share or not isinstance(method, dict):
        return tree
    name, share = str(method.get("preset")), method.get("share")
    if name not in PRESETS:
        return tree
    preset = PRESETS[name]
    if preset.recommended if share == "recommended" else preset.terms:
        return tree
    terminal().say(f"method.share: {share} is dropped: it is not for preset '{name}'")
    values = {**tree.values, "method": {k: v for k, v in method.items() if k != "share"}}
    return Tree(values, tree.origins)


def _terms(terms: dict[str, Any]) -> dict[str, TermOptions]:
    from moe_finetune.losses import TERMS

    resolved: dict[str, TermOptions] = {}
    for name, options in terms.items():
        if name not in TERMS:
            raise RecipeError(f"method.terms.{name}: unknown loss{_hint(str(name), TERMS)}")
        validated = _validated(TERMS[name].Options, options, "method", "terms", name)
        if not validated.removed:
            resolved[name] = validated
    return resolved


def _hint(name: str, names: Iterable[str]) -> str:
    """The shipped plugin that registers an unknown name, or the nearest known one."""
    for file in sorted((recipes_folder() / "plugins").glob("*.py")):
        if re.search(rf'(name = |register\(\s*)"{re.escape(name)}"', file.read_text()):
            return f": it is in a plugin; add --plugin recipes/plugins/{file.name}"
    return did_you_mean(name, names)
