"""Check before the first step that every loss term reaches something trainable."""

import copy
import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import Term
from moe_finetune.losses.inject import PerTermLosses
from moe_finetune.losses.objective import LayerLoss, Objective
from moe_finetune.losses.record import RoutingRecord
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

    Each term in turn is injected alone into a forward whose own loss is zero. Parameters with an
    exact-zero gradient (a LoRA ``A`` behind a ``B`` of zeros) are not in the list. A hinge at 0 has
    no gradient yet: its list is empty, with a warning. Random state, gradients and the terms' state
    are restored. If ranks share the model, every rank must call this.

    Raises:
        ObjectiveError: a term reaches no trainable parameter; the message names the remedy.
    """
    if not objective.terms:
        return {}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    device = next(model.parameters()).device
    wrapped = any(inside(layer) is not layer for layer in backbone_of(model).layers)
    sharded = wrapped or any(hasattr(p, "device_mesh") for p in trained.values())
    # All ranks must agree, because each takes part in the others' forwards.
    shared = sharded or any(hasattr(p, "device_mesh") for p in model.parameters())
    agreed = ranks.any_of_each if shared else list
    # Running tables of a term must not learn from random tokens, nor a target find its weight.
    probed = copy.deepcopy(objective)
    for term in probed.terms:
        term.options = term.options.model_copy(update={"target": None})
    positive = dict.fromkeys((term.name for term in probed.terms), False)
    connected: set[str] = set()

    def note(_: RoutingRecord, loss: LayerLoss) -> None:
        for name, value in loss.losses.items():
            positive[name] |= bool(value.any())
            if value.requires_grad:
                connected.add(name)

    joins = PerTermLosses()
    recorder = Recorder(model, probed, observers=[note], kernel=kernel)
    recorder.change(joins=joins)
    reached: dict[str, list[str]] = {}
    loss: Tensor | None = None
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        in_mode(model, train=True),
        torch.enable_grad(),
        uncompiled(model),
        recorder,
    ):
        torch.manual_seed(0)
        for term in probed.terms:
            if loss is None or sharded:  # FSDP2 goes through a graph only once
                loss = _zero_loss(model, objective.facts.vocab_size, device)
            joins.only = (term.name,)
            gradients = _gradients(loss, list(trained.values()), sharded)
            *acts, value = agreed([*map(_acts, gradients), positive[term.name]])
            names = [name for name, act in zip(trained, acts, strict=True) if act]
            met = term.name in connected and not value
            reached[term.name] = _judged(term, names, met)
    return reached


def _zero_loss(model: nn.Module, vocabulary: int, device: torch.device) -> Tensor:
    """A loss of 0 with the graph of a forward on random tokens."""
    ids = torch.randint(0, vocabulary, PROBE_TOKENS, device=device)
    # Under DDP's wrapper, which waits for a backward of its own, but with PEFT's, which puts soft
    # prompts before the tokens.
    unwrapped = getattr(model, "module", model)
    mask = torch.ones_like(ids)
    output = unwrapped(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
    return output.logits.float().sum() * 0.0


def _gradients(
    loss: Tensor, parameters: Sequence[nn.Parameter], sharded: bool
) -> Sequence[Tensor | None]:
    """The gradient of each parameter; None if the loss does not reach it."""
    if not parameters or not loss.requires_grad:
        return [None] * len(parameters)
    if not sharded:  # an optimizer that steps in the backward must not see these gradients
        return torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    # FSDP2 has its parameters in the graph only as gathered tensors, and reduces in a backward.
    former = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    loss.backward()
    gradients = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, former, strict=True):
        parameter.grad = gradient
    return gradients


def _acts(gradient: Tensor | None) -> bool:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local is not None and bool((local != 0).any())


def _judged(term: Term, parameters: list[str], met: bool) -> list[str]:
    """Return ``parameters``; raise if empty, unless the term is a hinge that is met."""
    if not parameters and term.hinge and met:
        log.warning(
            "method.terms.%s is 0 in every layer from the start. Its goal is already met, so it "
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
