"""Facts about a model family, declared once and never guessed from shapes.

Shape legend: L decoder layers, E routed experts, K selected per token, H hidden, D expert width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal

from packaging.version import Version

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models.structure import layers_with_experts
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


_num_experts = key("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_top_k = key(*TOP_K)
_expert_width = key("moe_intermediate_size", "intermediate_size")

UNREAD_POSITIONS = Rows(masks_by_position=False)


@dataclass(frozen=True)
class Family:
    """Facts of one model family; callables take the transformers config.

    Module paths are relative to a decoder layer of the loaded transformers model; a layer may lack
    some. For a composite (vision and language), the facts describe its language part, and callables
    take the config of the whole or of that part.

    Attributes:
        part: ``model_type`` of a composite's language part.
        name: its name in recipes, tests and the README, usually the ``model_type``.
        score: the function from router logits to scores, one of :data:`Score`.
        attention_targets, shared_targets: names of the linear layers that LoRA adapts.
        backbone: path of the decoder in the loaded model.
        block_path: the module with router and experts; empty if the decoder layer itself has them.
        router_weight: path of the weight in the router's module.
        router_returns: what that module returns, in order; in a version in which it does not, the
            default is tried. Names other than "logits", "weights" and "index" are passed through.
            If it does not return weights and index, they are the experts' arguments.
        router_logits: the module in the router whose output is the logits, if the router returns
            none.
        gated: whether experts have a gate projection, ``gate_up_proj``, or only ``up_proj``.
        renormalize, scaling: what happens to the selected scores before they weight the experts.
        own_weights: why the weights do not follow from these, so experts cannot be selected again.
        groups: number of expert groups, and number of groups a token may select from.
        fixed_layers: MoE layers whose experts are looked up by token and never change.
        separate_spaces: whether router and experts read vectors from different spaces.
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
    attention_targets: tuple[str, ...]
    shared_targets: tuple[str, ...] = ()
    backbone: str = "model"
    block_path: str = "mlp"
    router_name: str = "gate"
    router_weight: str = "weight"
    router_returns: tuple[str, ...] = ("logits", "weights", "index")
    router_logits: str | None = None
    experts_name: str = "experts"
    gated: bool = True
    num_experts: Callable[[Any], int] = _num_experts
    renormalize: Callable[[Any], bool] = lambda config: bool(config.norm_topk_prob)
    scaling: Callable[[Any], float] = lambda config: 1.0
    own_weights: str | None = None
    groups: Callable[[Any], tuple[int, int]] = lambda config: (1, 1)
    top_k: Callable[[Any], int] = _top_k
    moe_layers: Callable[[Any], list[int]] = layers_with_experts
    fixed_layers: Callable[[Any], list[int]] = lambda config: []
    expert_width: Callable[[Any], int] = _expert_width
    separate_spaces: Callable[[Any], bool] = lambda config: False
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

    @property
    def experts_path(self) -> str:
        return f"{self.block_path}.{self.experts_name}".lstrip(".")

    @property
    def router_path(self) -> str:
        return f"{self.block_path}.{self.router_name}".lstrip(".")

    @property
    def expert_parameters(self) -> tuple[str, str]:
        """Names of the stacked parameters of the loaded experts."""
        return ("gate_up_proj" if self.gated else "up_proj", "down_proj")

    @property
    def expert_targets(self) -> tuple[str, ...]:
        """PEFT ``target_parameters`` of the routed experts."""
        return tuple(f"{self.experts_path}.{p}" for p in self.expert_parameters)

    @property
    def router_target(self) -> str:
        """PEFT ``target_parameters`` entry of the router's weight."""
        return f"{self.router_path}.{self.router_weight}"


CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of the selection bias in transformers' classes."""

FAMILIES: Registry[Family] = Registry("family", UnsupportedModelError)


def after_dense_layers(config: Any) -> list[int]:
    """MoE layers of a DeepSeek-style config: all but the first ``first_k_dense_replace``."""
    first = config.first_k_dense_replace
    if not isinstance(first, int):
        raise UnsupportedModelError(
            f"{config.model_type}: first_k_dense_replace {first!r} in config.json must be the "
            "number of leading dense layers"
        )
    return list(range(first, config.num_hidden_layers))


def expert_groups(config: Any) -> tuple[int, int]:
    """DeepSeek's groups: ``n_group`` and ``topk_group``."""
    return int(config.n_group or 1), int(config.topk_group or 1)


def under(module: str, *names: str) -> tuple[str, ...]:
    """Paths of ``names`` in ``module``."""
    return tuple(f"{module}.{name}" for name in names)


QKVO = under("self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
MLA = under(
    "self_attn", "q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
)
"""DeepSeek's latent attention; ``q_proj`` if queries are not compressed."""

GATED_MLP = ("gate_proj", "up_proj", "down_proj")
SHARED_EXPERTS = under("mlp.shared_experts", *GATED_MLP)
SHARED_EXPERT = under("mlp.shared_expert", *GATED_MLP)


def require(config: Any, **supported_values: Any) -> None:
    """Raise UnsupportedModelError if a field of ``config`` has an unsupported value.

    For options of published configs that transformers' class ignores but vLLM's does not.
    """
    for key, allowed in supported_values.items():
        value = getattr(config, key, None)
        if value is not None and value not in allowed:
            supported = ", ".join(str(option) for option in allowed)
            raise UnsupportedModelError(
                f"{config.model_type}: {key} '{value}' is not supported; supported: {supported}"
            )
