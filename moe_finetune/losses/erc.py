"""Expert-router coupling: each router row should activate its own expert most (P2 eq. 3, 4).

P are proxies, one per router row, r a rank, I and O a projection's input and output width.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import relu, silu

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import LayerContext, ModelFacts, Term, TermOptions
from moe_finetune.losses.gram import off_diagonal
from moe_finetune.losses.record import Projection, ProjectionFactors, RoutingRecord
from moe_finetune.losses.tensors import (
    at_least_float32,
    check_shapes,
    full_precision,
    without_autocast,
)

Activation = Literal["gate", "up", "silu_gate", "swiglu", "output"]
WIDENED_BYTES = 2**23


@full_precision
def erc_loss(
    router_weight_EH: Tensor,
    gate_weight_EDH: Tensor,
    alpha: float = 1.0,
    noise: bool = True,
    router_grad: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``1/E² Σ_i Σ_{j≠i} [max(M_ij - αM_ii, 0) + max(M_ji - αM_ii, 0)]``, ``M_ij = ‖R̃_i W_g^j‖``.

    ``R̃_i = R_i ⊙ δ_i`` with ``δ_i ~ U(1-ε_i, 1+ε_i)^H`` and ``ε_i = min_{j≠i}‖R_i-R_j‖/(2‖R_i‖)``,
    both without gradient. It is 0 when every proxy activates its own expert most, and every expert
    responds most to its own proxy, by a factor of at least ``1/alpha``.

    Args:
        router_weight_EH: the router's weight.
        gate_weight_EDH: gate projections, adapters included.
        alpha: in [0, 1]; the paper finds 1 best at 64 experts and 0.5 at 256.
        noise: False sets δ = 1.
        router_grad: False makes R̃ without gradient (the paper's Figure 8).
        generator: source of δ; the default generator if None.

    Raises:
        ValueError: for wrong shapes or a negative ``alpha``.

    Warns:
        UserWarning: for ``alpha`` above 1, which lets other experts be activated more.

    Source: *Coupling Experts and Routers via an Auxiliary Loss* (arXiv 2512.23447), eq. 3, 4.
    """
    check_shapes(router_weight_EH=router_weight_EH, gate_weight_EDH=gate_weight_EDH)
    check_alpha(alpha)
    proxies_PH = at_least_float32(router_weight_EH if router_grad else router_weight_EH.detach())
    if noise:
        uniform_EH = torch.rand(
            proxies_PH.shape, generator=generator, dtype=proxies_PH.dtype, device=proxies_PH.device
        )
        proxies_PH = perturbed(proxies_PH, uniform_EH)
    return erc_from_table(erc_table(proxies_PH, gate_weight_EDH), alpha)


@full_precision
def erc_table(proxies_EH: Tensor, gate_weight_EDH: Tensor) -> Tensor:
    """``M[i, j]``: norm of expert j's gate projection of proxy i (``R_i``, or ``R̃_i``)."""
    check_shapes(proxies_EH=proxies_EH, gate_weight_EDH=gate_weight_EDH)
    return _table(
        at_least_float32(proxies_EH), lambda name: ProjectionFactors(gate_weight_EDH), "gate"
    )


@full_precision
def erc_from_table(table_EE: Tensor, alpha: float = 1.0) -> Tensor:
    """The loss from the table ``M``."""
    check_shapes(table_EE=table_EE)
    own_E1 = alpha * table_EE.diagonal().unsqueeze(1)
    excess_EE = relu(table_EE - own_E1) + relu(table_EE.T - own_E1)
    return off_diagonal(excess_EE).sum() / table_EE.shape[0] ** 2


def perturbed(proxies_PH: Tensor, uniform_PH: Tensor) -> Tensor:
    """``R ⊙ δ``, with δ from ``uniform_PH`` in [0, 1) scaled to ``U(1-ε, 1+ε)``."""
    with torch.no_grad():
        delta_PH = 1.0 + noise_width(proxies_PH).unsqueeze(-1) * (2.0 * uniform_PH - 1.0)
    return proxies_PH * delta_PH


def noise_width(proxies_PH: Tensor) -> Tensor:
    """``ε_i = min_{j≠i}‖R_i-R_j‖/(2‖R_i‖)`` (P,); 0 for a zero row, and for a single one."""
    # Near rows would lose their distance to rounding in float32's products; float64's are faster.
    wide = proxies_PH.dtype == torch.float64
    mode = "use_mm_for_euclid_dist" if wide else "donot_use_mm_for_euclid_dist"
    itself_PP = torch.eye(len(proxies_PH), dtype=torch.bool, device=proxies_PH.device)
    apart_PP = torch.cdist(proxies_PH, proxies_PH, compute_mode=mode)
    apart_PP = apart_PP.masked_fill(itself_PP, torch.inf)  # in place, no compiler takes it
    epsilon_P = apart_PP.amin(-1) / (2.0 * torch.linalg.vector_norm(proxies_PH, dim=-1))
    # A zero row stays zero, and a single expert has no neighbor to stay clear of.
    return epsilon_P.masked_fill(~epsilon_P.isfinite(), 0.0)


def check_alpha(alpha: float) -> None:
    """Raise ValueError for a negative ``alpha`` and warn above 1."""
    if not alpha >= 0:
        raise ValueError(f"alpha is {alpha}, expected a number in [0, 1]")
    if alpha > 1:
        warnings.warn(
            f"erc: alpha {alpha} is above 1, which allows other experts a stronger response than "
            "the matching one; the paper uses [0, 1]",
            stacklevel=3,
        )


def _table(
    proxies_PH: Tensor,
    factors: Callable[[Projection], ProjectionFactors],
    activation: Activation,
) -> Tensor:
    def project(inputs: Tensor, name: Projection) -> Tensor:
        return _project(inputs, factors(name))

    if activation == "up":
        made_EPO = project(proxies_PH, "up")
    else:
        made_EPO = project(proxies_PH, "gate")
        if activation != "gate":
            made_EPO = silu(made_EPO)
        if activation in ("swiglu", "output"):
            made_EPO = made_EPO * project(proxies_PH, "up")
        if activation == "output":
            made_EPO = project(made_EPO, "down")
    return torch.linalg.vector_norm(made_EPO, dim=-1).T


def _project(inputs: Tensor, factors: ProjectionFactors) -> Tensor:
    """``x (W + s B A)^T`` (E, P, O) for every expert without building the sum."""
    made_EPO = _Product.apply(inputs, factors.weight_EOI)
    if factors.a_ErI is None or factors.b_EOr is None:
        return made_EPO
    low_EPr = inputs @ factors.a_ErI.to(inputs.dtype).mT
    b_ErO = factors.b_EOr.to(inputs.dtype).mT
    return made_EPO.baddbmm_(low_EPr, b_ErO, alpha=factors.scaling)


class _Product(torch.autograd.Function):
    """``x W_e^T`` for all experts e, with x ``(P, I)`` or ``(E, P, I)``.

    Processes some experts at a time, so bfloat16 weights are not all converted to float32 at once.
    Batched, because the gate projection is a strided half of a fused stack, which one plain product
    would copy.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight_EOI: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight_EOI)
        ctx.set_materialize_grads(False)
        experts, outputs, _ = weight_EOI.shape
        made_EPO = inputs.new_empty(experts, inputs.shape[-2], outputs)
        for chunk in _some_experts(weight_EOI, inputs):
            weight = weight_EOI[chunk].to(inputs.dtype)
            torch.bmm(_batch(inputs, chunk, experts), weight.mT, out=made_EPO[chunk])
        return made_EPO

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_EPO: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if grad_EPO is None:  # only another term's gradient is computed
            return None, None
        inputs, weight_EOI = ctx.saved_tensors
        needs_inputs, needs_weight = ctx.needs_input_grad
        experts = weight_EOI.shape[0]
        grad_inputs = torch.zeros_like(inputs) if needs_inputs else None
        grad_weight = torch.empty_like(weight_EOI) if needs_weight else None
        for chunk in _some_experts(weight_EOI, inputs):
            if grad_inputs is not None:
                # x W^T -> g W: (P, O) x (O, I); all experts read the same x if it has no E.
                grad = torch.bmm(grad_EPO[chunk], weight_EOI[chunk].to(inputs.dtype))
                if inputs.dim() == 2:
                    grad_inputs += grad.sum(0)
                else:
                    grad_inputs[chunk] = grad
            if grad_weight is not None:
                # g^T x: (O, P) x (P, I), written where the weight's own gradient lies.
                grad_chunk, input_chunk = grad_EPO[chunk].mT, _batch(inputs, chunk, experts)
                if grad_weight.dtype == inputs.dtype:
                    torch.bmm(grad_chunk, input_chunk, out=grad_weight[chunk])
                else:
                    grad_weight[chunk] = torch.bmm(grad_chunk, input_chunk)
        return grad_inputs, grad_weight


def _some_experts(weight_EOI: Tensor, inputs: Tensor) -> list[slice]:
    """Slices of experts whose weights take about ``WIDENED_BYTES`` in the dtype of ``inputs``."""
    experts, outputs, width = weight_EOI.shape
    step = max(1, WIDENED_BYTES // (outputs * width * inputs.element_size()))
    return [slice(first, min(first + step, experts)) for first in range(0, experts, step)]


def _batch(inputs: Tensor, chunk: slice, experts: int) -> Tensor:
    return inputs.expand(experts, *inputs.shape[-2:])[chunk]


class ErcOptions(TermOptions):
    """Options of :func:`erc_loss`; ``activation`` is what M measures (P2 §4.5)."""

    alpha: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="another expert's activation may reach alpha times the matching expert's",
    )
    noise: bool = Field(
        default=True,
        description="perturb the rows at random, up to half the distance to the nearest row",
    )
    router_grad: bool = Field(
        default=True, description="whether its gradient also trains the routers"
    )
    activation: Activation = Field(
        default="gate", description="which product of an expert is measured (P2 §4.5)"
    )


class Erc(Term):
    """``erc``: how far each router row is from activating its own expert most."""

    name = "erc"
    source = "P2 eq. 3, 4"
    reads = "router weight and expert projections"
    trains = frozenset({"router", "experts"})
    needs = frozenset({"expert_factors"})
    Options = ErcOptions
    options: ErcOptions
    below = False

    def __init__(self, options: ErcOptions):
        super().__init__(options)
        check_alpha(options.alpha)
        self.trains = self.parts(options)

    @classmethod
    def parts(cls, options: ErcOptions) -> frozenset[Literal["router", "experts"]]:
        return cls.trains if options.router_grad else frozenset({"experts"})

    def check(self, facts: ModelFacts) -> None:
        """Refuse experts without a gate projection, unless only the up projection is read."""
        super().check(facts)
        if not facts.has_gate and self.options.activation != "up":
            raise ObjectiveError(
                "method.terms.erc reads the experts' gate projection, but this model's experts "
                "have none; set `activation: up` or remove the term"
            )

        if not facts.shared_input_space:
            raise ObjectiveError(
                "method.terms.erc sends the router's rows through the experts, but this model's "
                "router and experts read different vectors; remove the term"
            )

    def loss(self, record: RoutingRecord, context: LayerContext) -> Tensor:
        options = self.options
        assert record.expert_factors is not None and record.router_weight_EH is not None
        weight_EH = record.router_weight_EH
        with without_autocast(weight_EH.device):
            proxies_PH = at_least_float32(weight_EH if options.router_grad else weight_EH.detach())
            if options.noise:
                noise_PH = context.kept(self.name, partial(torch.rand_like, proxies_PH))
                proxies_PH = perturbed(proxies_PH, noise_PH)
            table_EE = _table(proxies_PH, record.expert_factors, options.activation)
            return erc_from_table(table_EE, options.alpha)
