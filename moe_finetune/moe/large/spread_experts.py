"""Expert parallelism: rows are sent to the rank of their expert, and results come back.

Each of N ranks has E / N of a layer's experts and its own tokens. For S = T*K pairs of token and
expert:

1. sort pairs by expert, and therefore by rank;
2. send their input rows and expert numbers to those ranks (all-to-all);
3. run each rank's experts on the received rows, one choice per row: y, and z if requested;
4. send these back in one message, in the order of (token, choice);
5. compute weighted sums and Gram matrices on the tokens' rank, as without spreading.

Gradients take the same path backward. A rank's experts then have the sum of all ranks' gradients.
Divided by N, as replicated parameters' gradients are averaged, it equals that of one process. Every
rank has the LoRA factors of all experts and uses its experts' part.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from moe_finetune.errors import (
    CaptureError,
    DependencyError,
    RecipeError,
    UnsupportedModelError,
)
from moe_finetune.losses.tensors import without_autocast
from moe_finetune.moe.experts.forward import Experts, ExpertsResult, LoraFactors, run_experts
from moe_finetune.moe.experts.sums_by_token import gram
from moe_finetune.moe.layers import is_spread, model_facts, moe_layers
from moe_finetune.quantization.weight import QuantizedWeight

DISPATCH = "ep_dispatch_experts"
"""transformers' expert-parallel plan in which each rank has its own tokens."""
KEY = "parallel.experts"


@dataclass(frozen=True)
class Spread:
    """How a layer's experts are distributed over ``group``, the ranks that share all."""

    group: Any
    rank: int
    size: int

    def own(self, all_E: Tensor) -> Tensor:
        """This rank's experts' part of a tensor over all experts."""
        return all_E.tensor_split(self.size)[self.rank]

    def all(self, own_E: Tensor) -> Tensor:
        """Gather a tensor of which each rank has its experts' part, with its gradient.

        Of a quantized stack, the packed parts are gathered.
        """
        if isinstance(own_E, QuantizedWeight):
            return own_E.on_parts(self._gathered)
        return _Gather.apply(own_E, self)

    def _gathered(self, own_E: Tensor) -> Tensor:
        own_E = own_E.contiguous()
        parts = [torch.empty_like(own_E) for _ in range(self.size)]
        distributed.all_gather(parts, own_E, group=self.group)
        return torch.cat(parts)


def spread_experts(model: Any) -> Any:
    """Distribute ``model``'s routed experts over the ranks, and return the model.

    Each rank keeps E / N consecutive experts, by transformers' plan ``ep_dispatch_experts``. Add an
    adapter afterwards. The training loop must average all other gradients over ranks: as DDP does,
    or by FSDP2, whose ``ignored_params`` must then be those of :func:`spread_modules`.

    Args:
        model: a causal language model with all experts, equal on all ranks, without an adapter.
    """
    ranks = distributed.get_world_size()
    check_spread(model, model_facts(model).num_experts, ranks, ranks)
    return place_experts(model, ranks, next(model.parameters()).device.type)


def check_spread(model: Any, experts: int, ranks: int, world: int) -> None:
    """Refuse a number of ranks that cannot share ``model``'s experts; it may be on meta."""
    if experts % ranks:  # checked first: no number of processes would help
        fit = ", ".join(str(n) for n in range(2, experts + 1) if experts % n == 0)
        raise RecipeError(
            f"{KEY}: {experts} experts cannot be divided by {ranks} ranks; choose one of {fit}"
        )
    if world == 1 or world % ranks:
        raise RecipeError(
            f"{KEY}: {ranks} ranks share all experts, but this run has {world}; start it with "
            f"accelerate launch --multi_gpu --num_processes {ranks}, or a multiple, or set "
            f"{KEY}: all"
        )
    if DISPATCH not in model.ep_plan.values():
        raise UnsupportedModelError(
            f"{KEY}: transformers has no plan {DISPATCH} for {type(model).__name__}; shard it with "
            "FSDP2 (recipes/hardware/fsdp2_8gpu.yaml), or leave the key out"
        )


def place_experts(model: Any, ranks: int, device: str) -> Any:
    """Shard ``model``'s expert stacks, which may be on meta, over a device mesh, in place.

    Generation then continues until every rank has finished, because each takes part in the others'
    forwards.
    """
    apply_plan, plan = _transformers_placement(model)
    world = distributed.get_world_size()
    shape = (world // ranks, ranks, 1)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("copies", "ep", "tp"))
    # `from_pretrained` requires ep_size == tp_size, which this plan does not need.
    apply_plan(model, mesh["ep"], mesh["tp"], plan)
    model.generate = partial(model.generate, synced_gpus=True)
    return model


def _transformers_placement(model: Any) -> tuple[Callable[..., Any], dict[str, str]]:
    """The function that places experts by a plan, and ``model``'s plan as it takes it."""
    try:  # losses, callback and the experts' products work without it
        from transformers.distributed import tensor_parallel
    except ImportError:
        raise DependencyError(
            "parallel.experts: needs transformers 5.19 or newer; install it, or train with FSDP2 "
            "(recipes/hardware)"
        ) from None
    try:  # transformers 5.22
        from transformers.distributed.expert_parallel import apply_expert_parallelism as apply_plan
    except ImportError:
        apply_plan = tensor_parallel.apply_expert_parallelism
    plan = dict(model.ep_plan)
    if "ep_implementation" in inspect.signature(apply_plan).parameters:
        # 5.23: a plan of names instead of patterns
        names = [name for name, _ in chain(model.named_parameters(), model.named_modules())]
        patterns = {name: re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}
        plan = {name: plan[pattern] for name, pattern in patterns.items() if pattern in plan}
    return apply_plan, plan


def spread_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose expert stacks are spread, without PEFT's wrappers and their factors."""
    return [layer.experts for layer in moe_layers(model) if is_spread(layer.experts)]


def spread_of(experts: Any) -> Spread | None:
    """How ``experts`` are distributed over ranks, or None."""
    if not is_spread(experts):
        return None
    stack = experts.down_proj
    mesh: Any = getattr(stack, "device_mesh", None)
    if mesh is None or mesh.ndim != 1 or not stack.placements[0].is_shard(0):
        raise CaptureError(
            f"{type(experts).__name__}: experts are spread over ranks in a way that is not "
            "supported; use transformers' plan ep_dispatch_experts with tp_size=1"
        )
    return Spread(mesh.get_group(), mesh.get_local_rank(), mesh.size())


def local(tensor: Any) -> Any:
    """This rank's part of a distributed tensor; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "device_mesh") else tensor


def run_spread(
    spread: Spread,
    hidden_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    experts: Experts,
    needs: frozenset[str],
) -> ExpertsResult:
    """:func:`run_experts` with weights and biases of only this rank's experts.

    All ranks of the group must call this equally often, even without tokens.
    """
    per_rank, width, _ = experts.down_EHD.shape
    flat_S = index_TK.reshape(-1)
    order_S = torch.argsort(flat_S, stable=True)
    counts_NE = torch.bincount(flat_S, minlength=per_rank * spread.size).view(spread.size, per_rank)
    came_NE = torch.empty_like(counts_NE)
    distributed.all_to_all_single(came_NE, counts_NE, group=spread.group)
    # The one read-back to the host: sizes of messages.
    sent, received = torch.stack([counts_NE.sum(1), came_NE.sum(1)]).tolist()
    numbers = torch.arange(per_rank, device=index_TK.device).repeat(spread.size)
    expert_R = numbers.repeat_interleave(came_NE.reshape(-1), output_size=sum(received))

    rows_SH = hidden_TH.to(experts.down_EHD.dtype)[order_S // index_TK.shape[1]]
    rows_RH = _Exchange.apply(rows_SH, sent, received, spread.group)
    want_z = bool(needs & {"activations", "activations_gram"})
    local_experts = replace(
        experts,
        lora_up=_own_factors(spread, experts.lora_up),
        lora_down=_own_factors(spread, experts.lora_down),
    )
    result = run_experts(
        rows_RH,
        expert_R.unsqueeze(1),
        rows_RH.new_ones(len(rows_RH), 1),
        local_experts,
        frozenset({"activations"} if want_z else ()),
    )
    outputs_RX = result.out_TH
    if result.activations_TKD is not None:
        outputs_RX = torch.cat([outputs_RX, result.activations_TKD.squeeze(1)], dim=1)
    back_SX = _Exchange.apply(outputs_RX, received, sent, spread.group)
    pairs_SX = back_SX[torch.argsort(order_S)]
    y_TKH, z_TKD = pairs_SX.view(*index_TK.shape, -1).tensor_split([width], dim=2)
    return _combined(hidden_TH, weights_TK, y_TKH, z_TKD, needs)


def _combined(
    hidden_TH: Tensor, weights_TK: Tensor, y_TKH: Tensor, z_TKD: Tensor, needs: frozenset[str]
) -> ExpertsResult:
    with without_autocast(hidden_TH.device):
        wide = torch.promote_types(
            torch.promote_types(weights_TK.dtype, y_TKH.dtype), torch.float32
        )
        out_T1H = torch.bmm(weights_TK.to(wide).unsqueeze(1), y_TKH.to(wide))
        return ExpertsResult(
            out_T1H.squeeze(1).to(hidden_TH.dtype),
            gram(z_TKD) if "activations_gram" in needs else None,
            gram(y_TKH) if "outputs_gram" in needs else None,
            z_TKD if "activations" in needs else None,
            y_TKH if "outputs" in needs else None,
        )


def _own_factors(spread: Spread, lora: LoraFactors | None) -> LoraFactors | None:
    if lora is None:
        return None
    own = [one if one.ndim == 2 else spread.own(one) for one in (lora.a_ErI, lora.b_EOr)]
    return replace(lora, a_ErI=own[0], b_EOr=own[1])


class _Exchange(torch.autograd.Function):
    """Send rows to other ranks by given counts, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any
    ) -> Tensor:
        # Not as attributes: a layer that runs again may send its rows to other ranks.
        ctx.save_for_backward(torch.tensor([list(sent), list(received)]))
        ctx.group = group
        return _exchanged(rows, list(sent), list(received), group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor):
        (sizes,) = ctx.saved_tensors
        sent, received = sizes.tolist()
        return _exchanged(grad, received, sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    output = rows.new_empty(sum(received), *rows.shape[1:])
    distributed.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output


class _Gather(torch.autograd.Function):
    """Concatenate all ranks' parts; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, own_E: Tensor, spread: Spread) -> Tensor:
        ctx.spread = spread
        return spread._gathered(own_E)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor):
        summed = grad.contiguous().clone()
        distributed.all_reduce(summed, group=ctx.spread.group)
        return ctx.spread.own(summed), None
