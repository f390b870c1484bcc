"""Gradients of each loss term and of the trainer's loss, from the trainer's own graph.

When the trainer's backward reaches the last hidden state, it has differentiated nothing below yet.
There the graph is differentiated once for the trainer's loss, with no term acting, and once for
each term, with the trainer's gradient replaced by zeros. Then the trainer's backward continues
unchanged. This works under any trainer, and no forward runs twice.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule

from moe_finetune.losses.inject import PerTermLosses
from moe_finetune.moe.checkpointing import inside
from moe_finetune.moe.layers import MoeLayer
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.training import ranks

PARTS = ("router", "experts")
TRAINERS_LOSS = ""
"""Key of the trainer's own loss among the terms' names."""

Sums = dict[tuple[int, int], Tensor]
"""This rank's part of each gradient, by MoE layer and number of the parameter in it."""


class TermGradients:
    """Sums the gradients of routers and routed experts over a window's forwards, loss by loss.

    The recorder's hooks must be on the model before :meth:`start`.
    """

    def __init__(self, recorder: Recorder, names: Sequence[str]):
        self.recorder = recorder
        self.names = tuple(names)
        self.count = 0
        self._sums: dict[tuple[str, str], Sums] = {}
        self._joins = PerTermLosses()
        self._leaves: dict[int, Tensor] = {}
        self._measured: dict[int, tuple[str, tuple[int, int]]] = {}
        self._acting: str | None = None
        self._hooks = ExitStack()
        self._forward = ExitStack()

    def start(self) -> None:
        backbone = self.recorder.backbone
        self.recorder.change(joins=self._joins)
        self._keep_on_host = self._is_large()
        handles = [
            backbone.register_forward_pre_hook(self._before_forward),
            backbone.register_forward_hook(self._after_forward, always_call=True),
        ]
        by_module = {id(layer.decoder_layer): layer for layer in self.recorder.layers}
        for module in map(inside, backbone.layers):
            hook = partial(self._note_leaves, by_module.get(id(module)))
            handles.append(module.register_forward_pre_hook(hook))
        for handle in handles:
            self._hooks.callback(handle.remove)

    def stop(self) -> None:
        self._forward.close()
        self._hooks.close()
        self.recorder.change(joins=None)
        self._leaves = {}

    def products(self) -> dict[str, dict[str, tuple[float, float, float]]]:
        """Squared norms of both gradients, and their inner product, by term and part.

        On every rank: in float64, with the term at weight 1, averaged as the trainer averages.
        """
        parts = [part for part in PARTS if any(part == kind for kind, _ in self._measured.values())]
        keys = [(name, part) for name in self.names for part in parts]
        rows = []
        for name, part in keys:
            term = self._sums.get((name, part), {})
            trainers = self._sums.get((TRAINERS_LOSS, part), {})
            pairs = ((term, term), (trainers, trainers), (term, trainers))
            rows.append([_product(first, right) for first, right in pairs])
        if ranks.world_size() > 1:
            totals = torch.tensor(rows, dtype=torch.float64, device=ranks.device())
            distributed.all_reduce(totals)
            rows = totals.tolist()
        products: dict[str, dict[str, tuple[float, float, float]]] = {
            name: {} for name in self.names
        }
        for (name, part), row in zip(keys, rows, strict=True):
            products[name][part] = row[0], row[1], row[2]
        return products

    def _is_large(self) -> bool:
        """Whether one gradient per loss exceeds the model's memory; the host then keeps them."""
        layers = self.recorder.layers
        modules = [m for layer in layers for m in (layer.router, layer.outer_experts)]
        measured = sum(p.numel() for m in modules for p in m.parameters() if p.requires_grad)
        total = sum(p.numel() for p in self.recorder.model.parameters())
        return measured * (len(self.names) + 1) > total

    # -- one forward --------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: tuple) -> None:
        self._forward.close()
        self._leaves = {}
        # Overrides the trainer's hooks, such as offloading, which return each saved tensor once.
        self._forward.enter_context(saved_tensors_hooks(_unchanged, _unchanged))

    def _note_leaves(self, layer: MoeLayer | None, module: nn.Module, args: tuple) -> None:
        """Record the graph's leaves; under FSDP2 a module has them only during a forward."""
        if self._acting is not None or not torch.is_grad_enabled():
            return
        for parameter in module.parameters():
            if parameter.requires_grad:
                self._leaves[id(parameter)] = parameter
        if layer is None:
            return
        for part, measured in zip(PARTS, (layer.router, layer.outer_experts), strict=True):
            trained = [p for p in measured.parameters() if p.requires_grad]
            for position, parameter in enumerate(trained):
                self._measured[id(parameter)] = part, (layer.index, position)

    def _after_forward(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._forward.close()
        if output is None or not (module.training and torch.is_grad_enabled()):
            return
        hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
        if hidden.requires_grad and self._leaves:
            leaves = list(self._leaves.values())
            # Removed once it has measured, or with the others where no backward comes: the hook and
            # the graph that it is on know each other, and a window has many forwards.
            remove = ExitStack()
            handle = hidden.register_hook(partial(self._measure, hidden, leaves, remove))
            remove.callback(handle.remove)
            self._hooks.callback(handle.remove)

    def _measure(
        self, hidden: Tensor, leaves: list[Tensor], remove: ExitStack, gradient: Tensor
    ) -> None:
        """Differentiate the graph below ``hidden`` once per loss; ``gradient`` is unchanged."""
        if self._acting is not None:  # the backward below begins here, too
            return
        self.count += 1
        # A reference's forward switches the adapter off and on; under FSDP2 that may have reached
        # the tensors in the graph only on the way off. They stay on: FSDP2 switches them on for
        # the trainer's backward only where it gathers them again.
        for leaf in leaves:
            leaf.requires_grad_(True)
        handles = [leaf.register_hook(partial(self._take, id(leaf))) for leaf in leaves]
        # FSDP2 would free the final norm after the first of these, and each of them starts there.
        above = self._sharded_above_layers()
        for module in above:
            module.set_reshard_after_backward(False, recurse=False)
        try:
            for name in (TRAINERS_LOSS, *self.names):
                self._acting = name
                self._joins.only = (name,)
                # A copy: fused norms write their input's gradient over their output's.
                seed = gradient.clone() if name == TRAINERS_LOSS else torch.zeros_like(gradient)
                # All leaves of the layers: a checkpointed layer frees only what a backward reads.
                torch.autograd.grad(hidden, leaves, seed, retain_graph=True, allow_unused=True)
        finally:
            self._acting = self._joins.only = None
            remove.close()
            for handle in handles:
                handle.remove()
            for module in above:
                module.set_reshard_after_backward(True, recurse=False)

    def _sharded_above_layers(self) -> list[FSDPModule]:
        """Modules outside the decoder layers that FSDP2 gathers again in each backward."""
        in_layers = {id(m) for layer in self.recorder.backbone.layers for m in layer.modules()}
        modules = self.recorder.model.modules()
        return [m for m in modules if isinstance(m, FSDPModule) and id(m) not in in_layers]

    def _take(self, leaf: int, gradient: Tensor) -> Tensor | None:
        """Add a leaf's gradient to its sum, and let the backward return nothing of its size."""
        if self._acting is None:
            return None
        if leaf in self._measured:
            part, key = self._measured[leaf]
            sums = self._sums.setdefault((self._acting, part), {})
            share = _rank_share(gradient)
            share = share.cpu() if self._keep_on_host else share
            sums[key] = sums[key] + share if key in sums else share
        if hasattr(gradient, "device_mesh"):
            return None
        return gradient.new_zeros(()).expand(gradient.shape)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _rank_share(gradient: Tensor) -> Tensor:
    """This rank's part of a gradient averaged over ranks."""
    if not ranks.distributed_run():
        return gradient.detach().clone()
    # Experts that are spread over ranks have their gradient in shards; others have all of it.
    distributed_tensor: Any = gradient
    spread = hasattr(gradient, "device_mesh")
    total = distributed_tensor.full_tensor() if spread else gradient.clone()
    total = total.contiguous()
    distributed.all_reduce(total)
    shares = total.flatten().tensor_split(ranks.world_size())
    return shares[ranks.rank()] / ranks.world_size()


def _product(first: Sums, right: Sums) -> float:
    keys = first.keys() & right.keys()
    return sum(float((first[key].double() * right[key].double()).sum()) for key in sorted(keys))
