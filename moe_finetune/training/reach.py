"""Prove, before the first step, that every loss term reaches something that trains."""

from __future__ import annotations

import copy
import logging

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import LayerContext, PreviousLayer, Term
from moe_finetune.losses.objective import LayerLoss, Objective
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.moe.context import ForwardOverrides
from moe_finetune.moe.grouped import Kernel
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.layers import backbone_of, in_mode, inside
from moe_finetune.training import ranks
from moe_finetune.training.term_gradients import uncompiled

PROBE_TOKENS = (2, 24)

log = logging.getLogger(__name__)


def check_reach(
    model: nn.Module, objective: Objective, kernel: Kernel = "auto"
) -> dict[str, list[str]]:
    """Trace each term's gradient on a few random tokens; return the parameters it reaches.

    Parameters that are still at an exact-zero gradient (a LoRA ``A`` behind a ``B`` of zeros) are
    not in the list. A hinge that is at 0 has no gradient yet: its list is empty, with a warning.
    The random state and the terms' own state are left as they were.

    Raises:
        ObjectiveError: a term reaches no trainable parameter; the message says what would fix it.
    """
    if not objective.terms:
        return {}
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    reached: dict[str, list[str]] = {}
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        wrapped = any(inside(layer) is not layer for layer in backbone_of(model).layers)
        if wrapped or any(hasattr(p, "device_mesh") for _, p in parameters):
            return _reach_of_sharded(model, objective, parameters, kernel)
        with uncompiled(model):
            values = _term_values(model, objective, device, kernel)
    # All ranks must agree where experts are spread: each has taken part in the others' forwards.
    spread = any(hasattr(p, "device_mesh") for p in model.parameters())
    agreed = ranks.any_of_each if spread else list
    for term in objective.terms:
        total = values.get(term.name)
        names: list[str] = []
        connected = False
        if total is not None and total.requires_grad and parameters:
            grads = torch.autograd.grad(
                total, [p for _, p in parameters], retain_graph=True, allow_unused=True
            )
            acts = agreed([grad is not None and bool((grad != 0).any()) for grad in grads])
            names = [name for (name, _), act in zip(parameters, acts, strict=True) if act]
            connected = any(grad is not None for grad in grads)
        (positive,) = agreed([total is not None and bool(total.any())])
        reached[term.name] = _judged(term, names, connected and not positive)
    return reached


def _reach_of_sharded(
    model: nn.Module,
    objective: Objective,
    parameters: list[tuple[str, nn.Parameter]],
    kernel: Kernel,
) -> dict[str, list[str]]:
    """The same under FSDP2 and checkpoint wrappers, which need a whole backward.

    Each term is injected by itself into a forward whose own loss is zero; all ranks take part.
    """
    reached: dict[str, list[str]] = {}
    device = parameters[0][1].device
    with in_mode(model, train=True):
        for term in copy.deepcopy(objective.terms):
            term.options = term.options.model_copy(
                update={"weight": 1.0, "share": None, "target": None}
            )
            ids = torch.randint(0, objective.facts.vocab_size, PROBE_TOKENS, device=device)
            values: list[Tensor] = []

            def note(_: RoutingRecord, layer: LayerLoss, into: list[Tensor] = values) -> None:
                into.extend(layer.values.values())

            objective_of_term = Objective([term], objective.facts)
            recorder = Recorder(model, objective_of_term, observers=[note], kernel=kernel)
            recorder.change(overrides=lambda rows: _even_teacher(objective, rows, device))
            with recorder, torch.enable_grad():
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
                (logits.float().sum() * 0.0).backward()
            names = []
            for name, parameter in parameters:
                grad, parameter.grad = parameter.grad, None
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                if ranks.any_rank(local is not None and bool((local != 0).any())):
                    names.append(name)
            # All ranks must agree: the next term's forward gathers parameters.
            met = not ranks.any_rank(not values or any(bool(value.any()) for value in values))
            reached[term.name] = _judged(term, names, met)
    return reached


def _even_teacher(objective: Objective, rows: int, device: torch.device) -> ForwardOverrides:
    """A teacher of the probe's tokens that spreads them evenly."""
    tokens, experts = rows * PROBE_TOKENS[1], objective.facts.num_experts
    even_TE = torch.zeros(tokens, experts, device=device)
    return ForwardOverrides(teacher=dict.fromkeys(objective.facts.moe_layers, even_TE))


def _judged(term: Term, parameters: list[str], met: bool) -> list[str]:
    """What the term reaches; only a hinge whose aim is met may reach nothing."""
    if not parameters and term.hinge and met:
        log.warning(
            "method.terms.%s is 0 in every layer from the start: its aim is already met, and it "
            "has no effect until that changes",
            term.name,
        )
    elif not parameters:
        remedy = {"router": "router.train: full or lora", "experts": "lora.targets: [..., experts]"}
        raise ObjectiveError(
            f"method.terms.{term.name}: its gradient reaches no trainable parameter. It reads "
            f"{term.reads}; make trainable: "
            f"{' or '.join(remedy[part] for part in sorted(term.trains))}; or remove the term "
            "(weight: 0)"
        )
    return parameters


def _term_values(
    model: nn.Module, objective: Objective, device: torch.device, kernel: Kernel
) -> dict[str, Tensor]:
    """Each term's sum over layers on random tokens, with its graph."""
    totals: dict[str, Tensor] = {}
    previous_layers: list[PreviousLayer] = []
    # Running tables of a term must not learn from random tokens.
    terms = copy.deepcopy(objective.terms)

    def observer(record: RoutingRecord, _: LayerLoss) -> None:
        previous = previous_layers[-1] if previous_layers else None
        # Whatever it routes, a teacher's part in the gradient is of the same parameters.
        context = LayerContext(previous, teacher_logits_TE=torch.zeros_like(record.logits_TE))
        with torch.enable_grad():
            for term in terms:
                if not term.applies(record.layer):
                    continue
                value = term.loss(record, context)
                if value is not None:
                    total = totals.get(term.name)
                    totals[term.name] = value if total is None else total + value
        previous_layers.append(PreviousLayer(record.layer, record.distribution_TE, record.index_TK))

    layers = list(backbone_of(model).layers)  # type: ignore[arg-type]
    checkpointed = [getattr(layer, "gradient_checkpointing", False) for layer in layers]
    ids = torch.randint(0, objective.facts.vocab_size, PROBE_TOKENS, device=device)
    try:
        for layer in layers:
            layer.gradient_checkpointing = False
        with (
            in_mode(model, train=True),
            Recorder(model, observers=[observer], needs=objective.needs, kernel=kernel),
            torch.enable_grad(),
        ):
            # Under DDP's wrapper, which waits for a backward of its own, but with PEFT's, which
            # puts soft prompts before the tokens.
            unwrapped = getattr(model, "module", model)
            mask = torch.ones_like(ids)
            unwrapped(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
    finally:
        for layer, checkpointing in zip(layers, checkpointed, strict=True):
            layer.gradient_checkpointing = checkpointing
    return totals
