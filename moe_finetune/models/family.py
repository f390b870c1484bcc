"""Facts about a model family that its class does not show.

:mod:`moe_finetune.models.module_places` has those that it shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal

from packaging.version import Version

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models.module_places import Places, places_of
from moe_finetune.registry import Registry

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
"""Functions from router logits to scores; the last is the square root of softplus."""


@dataclass(frozen=True)
class Rows:
    """What transformers' class of a family needs for packed rows and padding.

    Taken from each class and tested for every family: a sequence's results depend neither on
    another one in its row nor on padding.

    Attributes:
        masks_by_position: attention ends where positions start again; otherwise masks are built.
        per_sequence: classes in a layer that carry a state or a convolution from token to token;
            they run one sequence at a time.
        padding: what masked left padding does: nothing, it moves absolute positions, or
            ``per_sequence`` read it.
        generates_padded: whether generation is the same with left padding.
    """

    masks_by_position: bool = True
    per_sequence: tuple[str, ...] = ()
    padding: Literal["unseen", "moves", "read"] = "unseen"
    generates_padded: bool = True


TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k",
    "top_k_experts", "top_k",
)  # fmt: skip
"""Names of the number of selected experts in configs."""


def key(*names: str) -> Callable[[Any], int]:
    """The first of these integers that the config has; tests compare it with the class."""

    def read(config: Any) -> int:
        values = (getattr(config, name, None) for name in names)
        value = next((value for value in values if value is not None), None)
        if value is None:
            raise AttributeError(f"the config has none of {', '.join(names)}")
        return int(value)

    return read


_top_k = key(*TOP_K)

UNREAD_POSITIONS = Rows(masks_by_position=False)


@dataclass(frozen=True)
class Family:
    """Declared facts of one model family; callables take the transformers config.

    For a composite (vision and language), the facts describe its language part, and callables take
    the config of the whole or of that part.

    Attributes:
        part: ``model_type`` of a composite's language part.
        name: its name in recipes, tests and the README, usually the ``model_type``.
        score: the function from router logits to scores, one of :data:`Score`.
        attention_targets: the linear layers of attention that LoRA adapts, where it cannot adapt
            all that the class shows (:mod:`moe_finetune.models.module_places`).
        router_returns: what that module returns, in order; in a version in which it does not, the
            default is tried. Names other than "logits", "weights" and "index" are passed through.
            If it does not return weights and index, they are the experts' arguments.
        router_logits: the module in the router whose output is the logits, if the router returns
            none.
        renormalize, scaling: what happens to the selected scores before they weight the experts.
        own_weights: why the weights do not follow from these, so experts cannot be selected again.
        proportional: whether a token's weights are nevertheless its scores times one factor.
        groups: number of expert groups, and number of groups a token may select from.
        fixed_layers: MoE layers whose experts are looked up by token and never change.
        check: raises UnsupportedModelError for options of a config that are not supported.
        bias_export: where a checkpoint stores a bias on the selection.
        bias_on_logits: whether that bias is added to the logits, in place of the scores.
        architecture: the causal language model's class if transformers has none.
        since: the first transformers version with the class, if that is above the lowest supported.
        rows: requirements of packed rows and padding.
    """

    name: str
    model_type: str
    title: str
    score: Score
    attention_targets: tuple[str, ...] = ()
    router_returns: tuple[str, ...] = ("logits", "weights", "index")
    router_logits: str | None = None
    renormalize: Callable[[Any], bool] = lambda config: bool(config.norm_topk_prob)
    scaling: Callable[[Any], float] = lambda config: 1.0
    own_weights: str | None = None
    proportional: bool = False
    groups: Callable[[Any], tuple[int, int]] = lambda config: (1, 1)
    top_k: Callable[[Any], int] = _top_k
    fixed_layers: Callable[[Any], list[int]] = lambda config: []
    check: Callable[[Any], None] = lambda config: None
    bias_export: Literal["tensor", "noaux_tc", "none"] = "none"
    bias_on_logits: bool = False
    architecture: str = ""
    since: str = ""
    part: str = ""
    rows: Rows = field(default_factory=Rows)

    @property
    def class_name(self) -> str:
        if self.architecture:
            return self.architecture
        from transformers.models.auto import modeling_auto as auto

        if self.part:
            return auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[self.model_type]
        return auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type]

    @property
    def available(self) -> bool:
        """Whether the installed transformers has its class."""
        return not self.since or Version(version("transformers")) >= Version(self.since)

    def places(self, config: Any) -> Places:
        """Where the class of ``config``, the whole model's or its language part's, has what."""
        return places_of(config, self.attention_targets)


CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of the selection bias in transformers' classes."""

FAMILIES: Registry[Family] = Registry("family", UnsupportedModelError)


def expert_groups(config: Any) -> tuple[int, int]:
    """DeepSeek's groups: ``n_group`` and ``topk_group``."""
    return int(config.n_group or 1), int(config.topk_group or 1)


def under(module: str, *names: str) -> tuple[str, ...]:
    """Paths of ``names`` in ``module``."""
    return tuple(f"{module}.{name}" for name in names)


QKVO = under("self_attn", "q_proj", "k_proj", "v_proj", "o_proj")


def require(config: Any, **supported_values: Any) -> None:
    """Refuse unsupported values of fields that transformers' class ignores and vLLM's does not."""
    for key, allowed in supported_values.items():
        value = getattr(config, key, None)
        if value is not None and value not in allowed:
            supported = ", ".join(str(option) for option in allowed)
            raise UnsupportedModelError(
                f"{config.model_type}: {key} '{value}' is not supported; supported: {supported}"
            )
